"""``springtide plan``: which nodes a run fits, how long it takes there, and what that costs."""

from __future__ import annotations

import argparse
import functools

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_vocabulary, config_of
from springtide.cli.output import print_json, say

_PLAN = """  springtide plan --recipe llama3_8b --cluster nodes.yaml             # node types, prices and links in a file
  springtide plan --recipe gpu_1b --cluster nodes.yaml --measured runs/RUN   # tokens/s from what a run measured
  springtide plan --recipe gpu_1b --cluster nodes.yaml --train.micro-batch auto --json"""


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Print on which node types a run fits, how long it takes there and what it costs, cheapest first."
    commands.command("plan", _plan, help, functools.partial(_options, commands.show_all), _PLAN)


def _options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        required=True,
        help="node types with devices, prices and links: docs/how-to/plan.md",
    )
    measured = "folder of a run whose step time calibrates the roofline, and which tells what saves and restarts cost"
    parser.add_argument("--measured", metavar="RUN", default="", help=measured)
    measured_on = "with --measured: the node type that it ran on, where the file has several"
    parser.add_argument("--measured-on", metavar="NAME", default="", help=measured_on)
    add_vocabulary(parser)
    add_json(parser)


def _plan(options: argparse.Namespace) -> int:
    from springtide.planning.plan import plan

    config = config_of(options, runs_code=False)
    found = plan(config, options.cluster, options.measured, options.measured_on, options.vocabulary)
    print_json(found.as_dict()) if options.json else say(found.describe())
    return 0
