"""``springtide run``: look at a run, and steer one that trains. ``springtide verify``, ``springtide report``: proof, costs."""

from __future__ import annotations

import argparse
import contextlib
import functools
from typing import TYPE_CHECKING

from springtide.cli import runs
from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say, say_line

if TYPE_CHECKING:
    from springtide.run.control import Verb

_INSPECT = """  springtide run inspect runs/RUN                # starts and checkpoints, which are valid and why others are not
  springtide run inspect runs/RUN/checkpoints/step-0000000100 --verify   # read every byte of it"""
_VERIFY = """  springtide verify runs/RUN
  springtide verify runs/RUN --json"""
_REPORT = """  springtide report runs/RUN          # where the time went, and every restart
  springtide report runs/RUN --json"""
_STEER: dict[Verb, tuple[str, str]] = {
    "save": ("Make a run write a checkpoint now.", "  springtide run save runs/RUN"),
    "pause": (
        "Make a run save and give its workers back, until `run continue`.",
        "  springtide run pause s3://bucket/runs/RUN --wait 300",
    ),
    "continue": ("Let a paused run train on.", "  springtide run continue runs/RUN"),
    "resize": (
        "Set the most workers of a run, also after restarts.",
        "  springtide run resize runs/RUN 2\n  springtide run resize runs/RUN 0   # as many as the config allows",
    ),
    "stop": ("Make a run save and end, as Ctrl-C does.", "  springtide run stop runs/RUN"),
}


def add(commands: Commands) -> None:
    """Add the commands."""
    group = commands.group("run", "Look at a run, and steer it while it trains.")
    group.command("inspect", _inspect, "Show what a run or a checkpoint holds.", _inspect_options, _INSPECT)
    runs.add(group)
    for verb, (help, example) in _STEER.items():
        group.command(verb, functools.partial(_steer, verb), help, functools.partial(_steer_options, verb), example)
    help = "Prove that a run trained on exactly the samples it should have."
    commands.command("verify", _verify, help, _run_options, _VERIFY)
    help = "Print where the time of a run went, and what restarts cost."
    commands.command("report", _report, help, _run_options, _REPORT)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the folder of a run or of a checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    add_json(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    add_json(parser)


def _steer_options(verb: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    if verb == "resize":
        parser.add_argument("workers", type=int, help="most workers; 0 lifts the limit")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait for the effect")
    add_json(parser)


def _steer(verb: Verb, options: argparse.Namespace) -> int:
    from springtide.run.control import await_result, give
    from springtide.run.folder import open_run

    folder = open_run(options.run).folder
    command = give(folder, verb, getattr(options, "workers", 0))
    found = await_result(folder, command, options.wait)
    if options.json:
        print_json({"verb": verb, **found.model_dump(mode="json", exclude={"format"})})
    else:
        say(f"{verb}: at step {found.step}: {found.text}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from springtide.cli.inspect import inspect_run

    return inspect_run(options.path, options.verify, options.json)


def _verify(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    found = open_run(options.run).verify()
    if options.json:
        print_json(found.as_dict())
    else:
        say(
            f"{'ok' if found.ok else 'NOT OK'}: {found.steps_checked} steps checked against the order "
            f"{found.order_identity}; {found.steps_trained_again} trained again, world sizes {list(found.world_sizes)}"
        )
        lost = (
            f"; {found.steps_proven_by_chain_alone} of them are not in the journal"
            if found.steps_proven_by_chain_alone
            else ""
        )
        checkpoints = f"{found.checkpoints_checked} checkpoint{'s' * (found.checkpoints_checked != 1)}"
        say_line(
            f"  the chain of the training state proves {found.steps_proven_by_chain} steps, in {checkpoints}{lost}"
        )
        if found.goes_on_from:
            say_line(f"  it goes on from the chain of {found.goes_on_from}")
        for wrong in found.chain_mismatches:
            between = f"steps {wrong.after + 1} to {wrong.step}"
            say_line(f"  {wrong.where}: other {between}: chain expected {wrong.expected}, found {wrong.found}")
        for one in found.mismatches:
            say_line(f"  step {one.step}: expected {one.expected}, found {one.found}")
        for few in found.token_mismatches:
            say_line(f"  step {few.step}: {few.expected} tokens expected, found {few.found}")
        if found.missing:
            say_line(f"  neither in the journal nor proven by a chain: {list(found.missing)}")
        if found.checkpoints_unread:
            say_line(f"  no chain can be read in: {', '.join(found.checkpoints_unread)}")
    return 0 if found.ok else 1


def _report(options: argparse.Namespace) -> int:
    from springtide.run.folder import REPORT, open_run
    from springtide.tracking.ledger import Prices, ledger

    run = open_run(options.run)
    timeline = run.timeline
    book = ledger(timeline.condensed(), Prices.set_in(run.config.track))
    if options.json:
        print_json({"run": run.id, **book.as_dict(), "unknown_events": timeline.unknown})
        return 0
    say(f"run {run.id}: {book.held:.0f} worker-seconds held, {book.goodput:.1%} of them in new steps")
    if book.total_dollars:
        per_million = book.dollars_per_million_tokens
        say(f"  {book.total_dollars:.2f} $ for {book.tokens / 1e6:.2f} million tokens, {per_million:.4f} $ per million")
    if book.total_kwh:
        sources = "; ".join(book.energy_sources) or "unknown"
        say(f"  {book.total_kwh:.3g} kWh in {book.energy_counted / book.held:.1%} of that time ({sources})")
        if again := book.energy_kwh["recomputed"]:
            say(f"  recomputed steps cost {again:.3g} kWh")
    for kind, seconds in book.spent.items():
        if seconds:
            money = f"  {book.dollars[kind]:10.2f} $" if book.total_dollars else ""
            energy = f"  {book.energy_kwh[kind]:10.3g} kWh" if book.total_kwh else ""
            say(f"  {kind.replace('_', ' '):16} {seconds:10.1f}  {seconds / book.held:6.1%}{money}{energy}")
    for one in book.restarts:
        say(
            f"  step {one.step}: {one.workers_before} -> {one.workers_after} workers, {one.gap_s:.1f} s without a step, "
            f"{one.steps_lost} steps lost; {one.cause}"
        )
    for straggler in book.stragglers:
        say(f"  {straggler.describe()}")
    if timeline.unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(timeline.unknown.items()))
        count = sum(timeline.unknown.values())
        say(f"  skipped: {count} events of kinds that this version does not know: {kinds}")
    if not run.folder.exists(REPORT):  # torchrun has no driver that writes it
        with contextlib.suppress(OSError):  # a folder that only others may write to
            run.write_report()
    say(f"  {run.report}" if run.folder.exists(REPORT) else "  report.html is not there, and cannot be written")
    return 0
