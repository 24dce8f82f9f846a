"""``springtide run list`` and ``springtide run compare``: many runs, and two."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, print_json
from springtide.errors import printable

if TYPE_CHECKING:
    from springtide.run.compare import Comparison

_LIST = """  springtide run list runs
  springtide run list s3://bucket/runs --json
  springtide run list runs --out runs/index.html     # the same as a page, which leads to the page of each run"""
_COMPARE = """  springtide run compare runs/A runs/B       # settings, first step that differs, losses at equal tokens, costs
  springtide run compare runs/A runs/B --json"""


def add(group: Commands) -> None:
    """Add the commands to their group."""
    group.command("list", _list, "List the runs below a root: state, step, loss, cost.", _list_options, _LIST)
    help = "Compare two runs: settings, samples, losses and costs."
    group.command("compare", _compare, help, _compare_options, _COMPARE)


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="folder or URL that holds runs")
    parser.add_argument("--out", metavar="FILE", help="write them as a page, to a path or URL")
    add_json(parser)


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("other", help="another one")
    add_json(parser)


def _list(options: argparse.Namespace) -> int:
    from springtide.run.overview import overview

    rows = overview(options.root)
    if options.out:
        from springtide.run.list_page import write_list_page

        write_list_page(options.root, rows, options.out)
    if options.json:
        print_json([row._asdict() for row in rows])
        return 0
    if options.out:
        print(f"{len(rows)} runs: {options.out}")
        return 0
    if not rows:
        print(f"no runs below {options.root}")
        return 0
    width = max(len(row.id) for row in rows)
    figures = (f"{'step':>15}", f"{'loss':>8}", "workers", "goodput", f"{'$':>9}", f"{'kWh':>9}")
    heads = (f"{'state':17}", *figures, "last event (UTC)", "where")
    print("  ".join((f"{'run':{width}}", *heads)))
    for row in rows:
        seen = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.seen_s)) if row.seen_s else "none"
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        step = f"{row.step}/{row.num_steps}"
        print(
            printable(
                f"{row.id:{width}}  {row.state:17}  {step:>15}  {loss:>8}  {row.workers:>7}  {row.goodput:>7.1%}  "
                f"{row.dollars:>9.2f}  {row.energy_kwh:>9.3g}  {seen:16}  {row.where}".rstrip()
            )
        )
    return 0


def _compare(options: argparse.Namespace) -> int:
    from springtide.run.compare import compare_runs
    from springtide.run.folder import open_run

    found = compare_runs(open_run(options.run), open_run(options.other))
    if options.json:
        print_json(found.as_dict())
    else:
        _print(found)
    return 0


def _print(found: Comparison) -> None:
    one, other = found.runs
    if found.identical:
        print(f"identical: {found.common_steps} steps on the same samples, with the same losses bit for bit")
    else:
        for what, step in (("samples", found.first_other_samples), ("loss", found.first_other_loss)):
            where = "none" if step is None else f"step {step}"
            print(f"first step with other {what}: {where}, of {found.common_steps} that both have")
    rows: list[tuple[str, str, str]] = [("", one.id, other.id)]
    for name in (
        "last_step",
        "tokens",
        "loss",
        "heldout_loss",
        "worker_seconds",
        "goodput",
        "dollars",
        "energy_kwh",
        "starts",
    ):
        shown = [_figure(getattr(run, name)) for run in found.runs]
        rows.append((name.replace("_", " "), shown[0], shown[1]))
    rows += [(f"loss at {tokens:,} tokens", f"{a:.4f}", f"{b:.4f}") for tokens, a, b in found.curves]
    for name, (a, b) in found.settings.items():
        mark = " *" if name in found.changes_training else ""
        rows.append((f"{name}{mark}", _short(a), _short(b)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(printable("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()))
    if found.changes_training:
        print("* changes what is learned")


def _figure(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
