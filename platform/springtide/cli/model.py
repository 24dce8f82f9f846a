"""``springtide model evaluate`` and ``average``."""

from __future__ import annotations

import argparse
import dataclasses

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, add_trust, print_json

_EVALUATE = """  springtide model evaluate runs/RUN                     # the newest checkpoint, on all held-out text
  springtide model evaluate runs/RUN --step 400 --tokens 1M --json"""

_AVERAGE = """  springtide model average runs/RUN --last 3 --to runs/RUN-average
  springtide model average runs/RUN --ema --to runs/RUN-ema
  springtide model evaluate runs/RUN-average"""


def add(commands: Commands) -> None:
    """Add the group."""
    group = commands.group("model", "Use a checkpoint as a model.")
    help = "Print the held-out loss and bits per byte of a checkpoint."
    group.command("evaluate", _evaluate, help, _evaluate_options, _EVALUATE)
    help = "Write the mean of the weights of a run's newest checkpoints as a checkpoint of its own."
    group.command("average", _average, help, _average_options, _AVERAGE)


def _average_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="folder or URL to create")
    parser.add_argument("--last", metavar="N", type=int, default=1, help="number of checkpoints (default 1)")
    parser.add_argument(
        "--ema", action="store_true", help="average their exponential moving averages (optim.ema_half_life)"
    )


def _average(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    found = open_run(options.run).average(options.to, options.last, options.ema)
    print(f"wrote {found.folder.url}/checkpoints/{found.checkpoints[-1]}: weights only")
    return 0


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    parser.add_argument(
        "--step", metavar="N", type=int, default=None, help="step of the checkpoint; default: the newest"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=_tokens, default=0, help="held-out tokens, as train.eval_tokens; 0: all"
    )
    add_trust(parser)
    add_json(parser)


def _tokens(text: str) -> int:
    from springtide.config.quantities import Tokens  # pydantic loads only when needed

    return int(Tokens.parse(text))


def _evaluate(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    found = open_run(options.run).evaluate(options.step, options.tokens, options.trust_code)
    print_json(dataclasses.asdict(found)) if options.json else print(found.describe())
    return 0
