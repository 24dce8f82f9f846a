"""``springtide train``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_trust, config_of
from springtide.cli.progress import progress_bars

if TYPE_CHECKING:
    from springtide.run.folder import Run

_EXAMPLES = """  springtide train --recipe demo
  springtide train --recipe demo --optim.peak-lr 1e-3 --train.total 2M
  springtide train --recipe demo --resume                        # continue the newest run of this config
  springtide train --recipe demo --run.id mine --resume auto     # start it or continue it: for requeues and retries
  springtide train --config runs/RUN/config.yaml --run.id again  # repeat a saved run exactly"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.command("train", _train, "Train a run to its end, preparing its data first.", _EXAMPLES)
    add_config(parser, commands.show_all)
    add_trust(parser)
    parser.add_argument(
        "--profile", dest="train.profile", metavar="STEPS", default=argparse.SUPPRESS, help="short for --train.profile"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        metavar="auto",
        help="continue an existing run; auto starts one if there is none: for requeues, retries and spot jobs",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume although the config trains something else"
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="with --resume: restart the run at step 0; its checkpoints are set aside",
    )
    parser.add_argument("--demo", action="store_true", help=argparse.SUPPRESS)


def _train(options: argparse.Namespace) -> int:
    from springtide.app.train import train

    with progress_bars() as progress:
        run = train(
            config_of(options),
            resume=options.resume,
            accept_changes=options.accept_changes,
            from_scratch=options.from_scratch,
            progress=progress,
        )
    if not run.finished:
        steps = f"step {run.last_step} of {run.config.num_steps}"
        print(f"\nstopped at {steps}; the same command with --resume continues from there")
    elif options.demo:
        _farewell(run)
    else:
        print(f"\nrun {run.id}: {len(run.steps)} steps; report {run.report}")
    return 0


def _farewell(run: Run) -> None:
    """Print what the demo made, and what to try next."""
    before, after = run.evaluations[0], run.evaluations[-1]
    root = run.config.run.root
    fall = 1 - after.heldout_bits_per_byte / before.heldout_bits_per_byte
    print(
        f"""
made in {run.folder.url}
  report.html     loss, throughput and world size of this run; open it in a browser
  checkpoints/    {", ".join(run.checkpoints)}
  mlflow.json     its run in MLflow: mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db
held-out bits per byte: {before.heldout_bits_per_byte:.3f} before, {after.heldout_bits_per_byte:.3f} after ({fall:.0%} less)

try next
  springtide verify {run.folder.url}
  springtide run inspect {run.folder.url}
  springtide train --recipe demo --run.root {root} --train.total 2M --elastic.max-workers 3"""
    )
