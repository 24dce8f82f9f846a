"""``springtide train``: train one run. ``springtide sweep``: train many runs."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_resume, add_trust, config_of, program, tokens
from springtide.cli.output import print_json, progress_bars, say
from springtide.errors import ConfigError, explain, redacted

if TYPE_CHECKING:
    from springtide.api.resolve import ResolvedRun
    from springtide.config import Config
    from springtide.dataset import Progress
    from springtide.run.folder import Run

_EXAMPLES = """  springtide train --recipe demo
  springtide train --recipe demo --optim.peak-lr 1e-3 --train.total 2M
  springtide train mine.yaml --epochs 3
  springtide train --recipe demo --resume                        # continue the newest run of this config
  springtide train --recipe demo --run.id mine --resume auto     # start it or continue it: for requeues and retries
  springtide train mine.yaml                                     # settings in a file: docs/how-to/config-files.md
  springtide train runs/RUN/config.yaml --run.id again           # repeat a saved run exactly
  springtide train --recipe demo --dry-run                       # decide everything, train nothing"""


def add(commands: Commands) -> None:
    """Add the command ``springtide train``."""
    help = "Train a run to its end, preparing its data first."
    commands.command("train", _train, help, partial(_options, commands.show_all), _EXAMPLES)


def _options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    add_trust(parser)
    parser.add_argument(
        "--profile",
        dest="train.profile",
        metavar="STEPS",
        default=argparse.SUPPRESS,
        help="steps to profile, as train.profile",
    )
    help = "continue an existing run; auto starts one if there is none: for requeues, retries and spot jobs"
    add_resume(parser, help)
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume although the config trains something else"
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="with --resume: restart the run at step 0; its checkpoints are set aside",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="prepare the data, decide everything, print it, and train nothing"
    )
    length = "length of the run, in place of --train.total: "
    parser.add_argument("--epochs", metavar="N", type=float, help=f"{length}times that it reads its dataset")
    parser.add_argument("--steps", metavar="N", type=int, help=f"{length}steps")
    fisher = "pull each weight to where it starts by how much the text before depends on it (EWC): compute its Fisher "
    fisher += "information on so many tokens of that text, and set objective.anchor to it: docs/how-to/continue.md"
    parser.add_argument("--fisher-tokens", metavar="N", type=tokens, help=fisher)
    dataset = (
        "with --fisher-tokens: prepared dataset with the text to remember; default: what the run before trained on"
    )
    parser.add_argument("--fisher-dataset", metavar="FOLDER", default="", help=dataset)
    parser.add_argument("--demo", action="store_true", help=argparse.SUPPRESS)


def _train(options: argparse.Namespace) -> int:
    from springtide.api.resolve import resolve
    from springtide.api.train import demonstrate, train

    config = config_of(options)
    how = {name: getattr(options, name) for name in ("resume", "accept_changes", "from_scratch")}
    with progress_bars() as progress:
        config = _anchored(_of_length(config, options, progress), options)
        if options.dry_run:
            return _show(resolve(config, **how, progress=progress))
        run = demonstrate(config, progress) if options.demo else train(config, **how, progress=progress)
    if not run.finished:
        say(f"\n{_how_it_goes_on(run)}")
    elif options.demo:
        _farewell(run)
    else:
        say(f"\nrun {run.id}: {len(run.steps)} steps; report {run.report}")
    return 0


def _how_it_goes_on(run: Run) -> str:
    """Return a line about where a run stopped and where it resumes. The two steps differ if the driver was killed some
    steps after its newest checkpoint."""
    from springtide.checkpoint.format import step_of

    names, steps = run.checkpoints, f"step {run.last_step} of {run.config.num_steps}"
    saved = step_of(names[-1]) if names else None
    if saved is None:
        return f"stopped at {steps}, before its first checkpoint; the same command with --resume begins again"
    if saved >= run.last_step:
        return f"stopped at {steps}; the same command with --resume continues from there"
    lost = f"step {saved} is the newest that is saved"
    return f"stopped at {steps}; {lost}, and the same command with --resume continues from it"


def _of_length(config: Config, options: argparse.Namespace, progress: Progress) -> Config:
    """Return ``config`` with ``train.total`` set from --epochs or --steps, and print it. Raises ConfigError if more than one
    option gives the length."""
    from springtide.api.resolve import with_epochs, with_steps

    lengths = {"--epochs": options.epochs, "--steps": options.steps, "--train.total": vars(options).get("train.total")}
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        (first, value), *others = given.items()
        limit = f"is given, and {' and '.join(name for name, _ in others)} too"
        raise ConfigError(explain(first, value, limit, "give the length of the run once"))
    if options.epochs is not None:
        config = with_epochs(config, options.epochs, options.resume and not options.from_scratch, progress)
    elif options.steps is not None:
        config = with_steps(config, options.steps)
    else:
        return config
    say(f"# {config.num_steps:,} steps: train.total = {int(config.train.total)}")
    return config


def _anchored(config: Config, options: argparse.Namespace) -> Config:
    """Return ``config`` with ``objective.anchor`` set to the URL of Fisher information (importance of each weight), computed on
    --fisher-tokens tokens; print the URL. Without --fisher-tokens, return ``config`` unchanged."""
    if options.fisher_tokens is None:
        if options.fisher_dataset:
            limit = "is the text of a Fisher information"
            raise ConfigError(explain("--fisher-dataset", options.fisher_dataset, limit, "give --fisher-tokens, too"))
        return config
    from springtide.run.find import check_id
    from springtide.run.fisher import anchored

    check_id(config, options.resume)  # before the computation, which may take minutes
    resume = bool(options.resume and not options.from_scratch)
    config = anchored(config, options.fisher_tokens, options.fisher_dataset, resume, options.trust_code)
    say(f"# objective.anchor = {config.objective.anchor}")
    return config


def _show(found: ResolvedRun) -> int:
    """Print the resolved config of a dry run as a config file; other facts, such as steps and workers, are comments in it."""
    from springtide import config as configs

    start = redacted(found.starts_from) if found.starts_from else "step 0"
    lines = [
        f"run {found.run.id} would start from {start}",
        *([] if found.finished else _decided(found)),
        *found.remarks,
    ]
    say("".join(f"# {line}\n" for line in lines) + configs.dump(configs.redact(found.config)), end="")
    return 0


def _decided(found: ResolvedRun) -> list[str]:
    """Return lines with the numbers that a dry run resolved: steps, tokens, epochs, parameters, workers."""
    from springtide.planning.arithmetic import model_size

    config, data, elastic = found.config, found.data, found.config.elastic
    read = ", ".join(f"{name} {one.epochs:.3g} times" for name, one in data.drawn(config.num_steps).items())
    lines = [f"{config.num_steps:,} steps of {config.tokens_per_step:,} tokens; reads {read}"]
    workers = f"{elastic.min_workers} to {elastic.max_workers} workers, train.micro_batch = {config.train.micro_batch}"
    if config.model.source:
        return [*lines, workers]
    size = model_size(config.model, data.vocab_size, data.sequence_length)
    return [*lines, f"{size.num_parameters:,} parameters; {workers}"]


def _farewell(run: Run) -> None:
    """Print a summary of the demo run, and commands to try next."""
    from springtide.api.train import account

    root, folder, springtide = run.config.run.root, run.folder.url, program()
    say(
        f"""
{account(run)}

try next
  {springtide} verify {folder}
  {springtide} report {folder}
  {springtide} train --recipe demo --run.root {root} --train.total 2M --elastic.max-workers 3
  {os.path.join(os.path.dirname(sys.executable), "mlflow")} ui --backend-store-uri sqlite:///{root}/mlflow.db"""
    )


# ``springtide sweep``: train many runs, to search for good settings.

_SWEEP_EXAMPLES = """  springtide sweep --space tune_spaces/lr_and_decay.py --recipe tiny
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --scheduler none --elastic.max-workers 4
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --resume   # after Ctrl-C or a crash
  springtide train --config runs/first/best.yaml --train.total 2M                            # its best point, for longer"""


def add_sweep(commands: Commands) -> None:
    """Add the command ``springtide sweep``."""
    help = "Try many points of a space in parallel, and print which is best."
    commands.command("sweep", _sweep, help, partial(_sweep_options, commands.show_all), _SWEEP_EXAMPLES)


def _sweep_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
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
    # a sweep interrupted before its first evaluation has no best trial, but counts as done: its trials have saved
    return 0 if result.best or any(one.status != "failed" for one in result.outcomes) else 1
