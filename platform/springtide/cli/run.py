"""``springtide run inspect``, ``springtide verify``, ``springtide report``: the contents, proof and costs of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json

from springtide.cli.commands import Commands
from springtide.cli.options import add_json

_INSPECT = """  springtide run inspect runs/RUN                # starts and checkpoints, which are valid and why others are not
  springtide run inspect runs/RUN/checkpoints/step-0000000100 --verify   # read every byte of it"""
_VERIFY = """  springtide verify runs/RUN
  springtide verify runs/RUN --json"""
_REPORT = """  springtide report runs/RUN          # where the time went, and every restart
  springtide report runs/RUN --json"""


def add(commands: Commands) -> None:
    """Add the commands."""
    group = commands.group("run", "Look at a run.")
    parser = group.command("inspect", _inspect, "Show what a run or a checkpoint holds.", _INSPECT)
    parser.add_argument("path", help="the folder of a run or of a checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    add_json(parser)
    parser = commands.command(
        "verify", _verify, "Prove that a run trained on exactly the samples it should have.", _VERIFY
    )
    parser.add_argument("run", help="the run's folder")
    add_json(parser)
    parser = commands.command("report", _report, "Print where the time of a run went, and what restarts cost.", _REPORT)
    parser.add_argument("run", help="the run's folder")
    add_json(parser)


def _inspect(options: argparse.Namespace) -> int:
    from springtide.cli.inspect import inspect_run

    return inspect_run(options.path, options.verify, options.json)


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
    print(f"run {run.id}: {book.held:.0f} worker-seconds held, {book.goodput:.1%} of them in new steps")
    if dollars:
        print(f"  {dollars:.2f} $ for {tokens / 1e6:.2f} million tokens, {per_million:.4f} $ per million")
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
        print(f"  {straggler.describe()}")
    print(f"  {run.report}")
    return 0
