"""``springtide sweep``."""

from __future__ import annotations

import argparse
from functools import partial

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_resume, add_trust, config_of
from springtide.cli.output import print_json, say

_EXAMPLES = """  springtide sweep --space tune_spaces/lr_and_decay.py --recipe tiny
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --scheduler none --elastic.max-workers 4
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --resume   # after Ctrl-C or a crash
  springtide train --config runs/first/best.yaml --train.total 2M                            # its best point, for longer"""


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Try many points of a space in parallel, and print which is best."
    commands.command("sweep", _sweep, help, partial(_options, commands.show_all), _EXAMPLES)


def _options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    add_trust(parser)
    parser.add_argument("--space", metavar="FILE", required=True, help="file with a table, as in tune_spaces/")
    parser.add_argument(
        "--name", metavar="NAME", default="", help="name of the sweep and its folder; generated if omitted"
    )
    parser.add_argument("--search", metavar="HOW", default="random", help="random, grid, or tpe, which needs optuna")
    parser.add_argument("--scheduler", metavar="NAME", default="asha", help="none, asha, hyperband, median, pbt, pb2")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the points")
    parser.add_argument(
        "--concurrent", metavar="N", type=int, default=0, help="number of trials at a time; 0: all that fit the cluster"
    )
    add_resume(parser, "continue the sweep --name; auto starts it if there is none: for requeues and retries")
    add_json(parser)


def _sweep(options: argparse.Namespace) -> int:
    from springtide.api.sweep import sweep

    result = sweep(
        config_of(options),
        options.space,
        name=options.name,
        search=options.search,
        scheduler=options.scheduler,
        seed=options.seed,
        concurrent=options.concurrent,
        resume=options.resume,
        say=partial(say, error=options.json),
    )
    if options.json:
        print_json(result.as_dict())
    # interrupted before the first evaluation, it has no best trial, and trials that saved
    return 0 if result.best or any(one.status != "failed" for one in result.outcomes) else 1
