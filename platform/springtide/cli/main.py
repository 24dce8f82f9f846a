"""The command line: ``springtide prepare | train | sweep | evaluate | verify | report | inspect | fit`` and, of
``cli_elastic``, ``drill | plan | notice``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from springtide import config as configs
from springtide.cli import elastic
from springtide.config import Config
from springtide.config.fields import fields
from springtide.errors import ConfigError, SpringtideError, explain, redacted

_EXAMPLES = {
    "prepare": """examples:
  springtide prepare --recipe demo
  springtide prepare --recipe demo --corpus.source 's3://bucket/text/*.txt' --corpus.vocab-size 16384
  springtide prepare --recipe demo --run.id twin --save twin.yaml   # for torchrun -m springtide.training --config twin.yaml""",
    "train": """examples:
  springtide train --recipe demo
  springtide train --recipe demo --optim.peak-lr 1e-3 --train.total 2M
  springtide train --recipe demo --resume                        # the newest run of this config goes on
  springtide train --recipe demo --run.id mine --resume auto     # begins it, or goes on with it: for requeues and retries
  springtide train --config runs/RUN/config.yaml --run.id again  # a saved run, once more, exactly""",
    "verify": """examples:
  springtide verify runs/RUN
  springtide verify runs/RUN --json""",
    "sweep": """examples:
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe tiny
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --scheduler none --elastic.max-workers 4
  springtide sweep --space tune_spaces/lr_and_decay.py --recipe demo --name first --resume   # after Ctrl-C or a crash
  springtide train --config runs/first/best.yaml --train.total 10M                           # the best of it, for longer""",
    "evaluate": """examples:
  springtide evaluate runs/RUN                     # the newest checkpoint, on all that was held out
  springtide evaluate runs/RUN --step 400 --rows 64 --json""",
    "report": """examples:
  springtide report runs/RUN          # where the time went, and every restart
  springtide report runs/RUN --json""",
    "fit": """examples:
  springtide fit --recipe llama3_8b --workers 16 --vocabulary 128256
  springtide fit --recipe gpu_1b --workers 8 --parallel.recompute full --json""",
    "inspect": """examples:
  springtide inspect runs/RUN                # starts and checkpoints, which count and why others do not
  springtide inspect runs/RUN/checkpoints/step-0000000100 --verify   # read every byte of it
  springtide inspect datasets/FINGERPRINT    # counts, digests, a few rows as text
  springtide inspect datasets/FINGERPRINT --verify""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a check failed, 2 a bad setting, 130 interrupted."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    try:
        if unknown:
            known = [f"--{name.replace('_', '-')}" for name in fields()]
            raise ConfigError(explain("option", unknown[0], "is not known here", configs.nearest(unknown[0], known)))
        return int(options.command(options))
    except (ConfigError, ValueError) as error:
        _complain(error)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; nothing is left for the interpreter to flush into the pipe
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 0
    except (SpringtideError, OSError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        print("\nstopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130


def _complain(error: BaseException) -> None:
    print(f"springtide: {redacted(str(error))}", file=sys.stderr)


def config_of(options: argparse.Namespace, runs_code: bool = True) -> Config:
    """The config that --recipe or --config names, with every dotted override applied. ``runs_code``: whether the command runs
    the model; what a file names as its code then needs --trust-code, what is typed does not."""
    given = {name: value for name, value in vars(options).items() if "." in name}
    trusts = not runs_code or "model.source" in given or options.trust_code
    base = configs.load(options.config, trusts) if options.config else configs.recipe(options.recipe)
    return configs.override(base, {name: _value(name, text) for name, text in given.items()})


def _value(name: str, text: str) -> Any:
    """Text as the config reads it: numbers and amounts are left to the field's own type, lists and tables are YAML."""
    return yaml.safe_load(text) if text[:1] in "[({" else text


def _prepare(options: argparse.Namespace) -> int:
    from springtide.app.train import prepare
    from springtide.cli.inspect import show_dataset

    with _progress() as progress:
        config = prepare(config_of(options, runs_code=False), progress)
    if options.save:
        with open(options.save, "w") as file:
            if configs.secret_fields(config):
                os.fchmod(file.fileno(), 0o600)
            file.write(configs.dump(config))
    return show_dataset(config.shards.dataset, False, options.json)


def _train(options: argparse.Namespace) -> int:
    from springtide.app.train import train

    with _progress() as progress:
        run = train(
            config_of(options),
            resume=options.resume,
            accept_changes=options.accept_changes,
            from_scratch=options.from_scratch,
            progress=progress,
        )
    if not run.finished:
        print(
            f"\nstopped at step {run.last_step} of {run.config.num_steps}; the same command with --resume goes on from there"
        )
    elif options.demo:
        _farewell(run)
    else:
        print(f"\nrun {run.id}: {len(run.steps)} steps; report {run.report}")
    return 0


def _farewell(run: Any) -> None:
    """What the demo made, and what to try next."""
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
  springtide inspect {run.folder.url}
  springtide train --recipe demo --run.root {root} --train.total 2M --elastic.max-workers 3"""
    )


def _sweep(options: argparse.Namespace) -> int:
    from springtide.app.sweep import sweep

    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else print
    verdict = sweep(
        config_of(options),
        options.space,
        name=options.name,
        search=options.search,
        scheduler=options.scheduler,
        seed=options.seed,
        concurrent=options.concurrent,
        resume=options.resume,
        say=say,
    )
    if options.json:
        print(json.dumps(verdict.as_dict()))
    return 0 if verdict.best else 1


def _evaluate(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run
    from springtide.track.console import describe

    found = open_run(options.run).evaluate(options.step, options.rows, options.trust_code)
    print(json.dumps(dataclasses.asdict(found)) if options.json else describe(found))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    result = open_run(options.run).verify()
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{'ok' if result['ok'] else 'NOT OK'}: {result['steps_checked']} steps checked against the order ", end=""
        )
        print(
            f"{result['order_identity']}; {result['steps_trained_again']} trained again, world sizes {result['world_sizes']}"
        )
        for mismatch in result["mismatches"]:
            print("  step {step}: expected {expected}, found {found}".format(**mismatch))
        if result["missing"]:
            print(f"  not in the journal: {result['missing']}")
    return 0 if result["ok"] else 1


def _report(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run
    from springtide.track.console import describe
    from springtide.track.ledger import Prices, ledger

    run = open_run(options.run)
    book = ledger(run.events, Prices(run.config.track.price, run.config.track.spot_price))
    dollars = sum(book.dollars.values())
    tokens = max((step.tokens for step in run.steps), default=0)
    per_million = 1e6 * dollars / tokens if tokens else 0.0
    if options.json:
        figures = {"goodput": book.goodput, "tokens": tokens, "dollars_per_million_tokens": per_million}
        print(json.dumps({"run": run.id, **figures, **dataclasses.asdict(book)}))
        return 0
    print(f"run {run.id}: {book.held:.0f} worker-seconds held, {book.goodput:.1%} of them in steps that were new")
    if dollars:
        print(f"  {dollars:.2f} $ for {tokens / 1e6:.2f} million tokens, {per_million:.4f} $ a million")
    for kind, seconds in book.spent.items():
        if seconds:
            money = f"  {book.dollars[kind]:10.2f} $" if dollars else ""
            print(f"  {kind.replace('_', ' '):16} {seconds:10.1f}  {seconds / book.held:6.1%}{money}")
    for one in book.restarts:
        print(
            f"  step {one.step}: {one.workers_before} -> {one.workers_after} workers, {one.gap_s:.1f} s without a step, "
            f"{one.steps_lost} steps lost; {one.cause}"
        )
    for straggler in book.stragglers:
        print(f"  {describe(straggler)}")
    print(f"  {run.report}")
    return 0


def _fit(options: argparse.Namespace) -> int:
    from springtide.app.estimate import estimate_memory, gigabytes

    config = config_of(options)
    eos_id = 0 if config.shards.mask_across_documents else None
    found = estimate_memory(config, options.vocabulary or config.corpus.vocab_size, eos_id, options.workers)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"of tensors, on each of {options.workers} workers, in a step:")
    for words, size in found.items():
        print(f"  {gigabytes(size):>10}  {words}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from springtide.cli.inspect import show

    return show(options.path, options.verify, options.json)


def _progress() -> Any:
    """A rich progress bar that is called with (stage, done, total); silent where stderr is no terminal."""
    import contextlib

    from rich.console import Console
    from rich.progress import Progress

    @contextlib.contextmanager
    def bars() -> Any:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
            tasks: dict[str, Any] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = shown.add_task(stage, total=total)
                shown.update(tasks[stage], completed=done, visible=done < total)

            yield report

    return bars()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="springtide", description="Elastic training of language models on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, examples: str = ""
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help,
            description=help,
            epilog=examples or _EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=run)
        return sub

    sub = command("prepare", _prepare, "Turn text into a sealed dataset, or find the one made before.")
    _add_config(sub)
    sub.add_argument("--save", metavar="FILE", help="write the resolved config there")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    _add_train(command)
    _add_sweep(command)
    sub = command("evaluate", _evaluate, "Say the held-out loss and bits per byte of a checkpoint.")
    sub.add_argument("run", help="the run's folder")
    sub.add_argument("--step", metavar="N", type=int, default=None, help="the newest checkpoint if left out")
    sub.add_argument("--rows", metavar="N", type=int, default=0, help="of each corpus together; 0 takes all")
    _add_trust(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("verify", _verify, "Prove that a run trained on exactly the samples it should have.")
    sub.add_argument("run", help="the run's folder")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("report", _report, "Say where the time of a run went, and what its restarts cost.")
    sub.add_argument("run", help="the run's folder")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command("fit", _fit, "Say what a worker's device must hold for a step, and what would make it less.")
    _add_config(sub)
    _add_trust(sub)
    sub.add_argument("--workers", metavar="N", type=int, default=1, help="that train")
    sub.add_argument("--vocabulary", metavar="N", type=int, default=0, help="ids; 0 takes corpus.vocab_size")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    elastic.add(command)
    sub = command("inspect", _inspect, "Show what a run, a checkpoint or a dataset holds.")
    sub.add_argument("path", help="a run's, a checkpoint's or a dataset's folder")
    sub.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_train(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command("train", _train, "Train a run to its end, preparing its data first.")
    _add_config(sub)
    _add_trust(sub)
    sub.add_argument(
        "--profile", dest="train.profile", metavar="STEPS", default=argparse.SUPPRESS, help="--train.profile"
    )
    sub.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        metavar="auto",
        help="go on with a run that exists; auto begins it where there is none: for requeues, retries and spot jobs",
    )
    sub.add_argument("--accept-changes", action="store_true", help="resume although the config trains something else")
    sub.add_argument(
        "--from-scratch",
        action="store_true",
        help="with --resume: begin the run again at step 0; its checkpoints are set aside",
    )
    sub.add_argument("--demo", action="store_true", help=argparse.SUPPRESS)


def _add_sweep(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command("sweep", _sweep, "Try many points of a space at once, and say which is best.")
    _add_config(sub)
    _add_trust(sub)
    sub.add_argument("--space", metavar="FILE", required=True, help="a table, as in tune_spaces/")
    sub.add_argument("--name", metavar="NAME", default="", help="of the sweep and its folder; made up if left out")
    sub.add_argument("--search", metavar="HOW", default="random", help="random, grid, or tpe, which needs optuna")
    sub.add_argument("--scheduler", metavar="NAME", default="asha", help="none, asha, hyperband, median, pbt, pb2")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="of the points")
    sub.add_argument(
        "--concurrent", metavar="N", type=int, default=0, help="trials at once; 0: as many as there is room for"
    )
    sub.add_argument("--resume", action="store_true", help="go on with the sweep --name")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code", action="store_true", help="run the model.source that the run or --config FILE names"
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    """--recipe, --config, and an option for every field: ``--section.field``."""
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--recipe", metavar="NAME", help=f"one of {', '.join(configs.recipes.RECIPES)}")
    chosen.add_argument("--config", metavar="FILE", help="a saved config, YAML or JSON")
    for section, field in Config.model_fields.items():
        group = parser.add_argument_group(section, field.description)
        for name, leaf in fields().items():
            if name.startswith(f"{section}."):
                spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
                text = f"{leaf.description} (default {leaf.default})".replace("%", "%%")
                group.add_argument(*spellings, dest=name, metavar="X", default=argparse.SUPPRESS, help=text)


if __name__ == "__main__":
    sys.exit(main())
