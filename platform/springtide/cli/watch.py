"""``springtide run why`` and ``springtide run watch``: what limits a run, and what it does now."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, print_json
from springtide.errors import ConfigError, SpringtideError, explain, printable, redacted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from springtide.run.folder import Run
    from springtide.run.watch import Picture, WatchedRun

_WHY = """  springtide run why runs/RUN          # what limits it, the most costly first, and what to try
  springtide run why s3://bucket/runs/RUN --json"""
_WATCH = """  springtide run watch runs/RUN          # in place, until the run is over or Ctrl-C
  springtide run watch s3://bucket/runs/RUN --every 10
  springtide run watch runs/RUN --once | cat"""
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.,-~=*#"
"""For terminals that do not show UTF-8."""
_LOOK_S, _LOOK_AT_STORE_S = 1.0, 5.0
"""Time between looks at a local folder, and at an object store [s]."""
_LOOK_AT_LEASE_S = 15.0
"""Silence after which the lease is asked whether the driver has ended: one that was killed has written no event [s]."""
_LONGEST_CURVE = 60


def add(group: Commands) -> None:
    """Add the commands to their group."""
    group.command("why", _why, "Say what limits a run, in words and numbers, and what to try.", _why_options, _WHY)
    help = "Show what a run does now, refreshed in place until it is over."
    group.command("watch", _watch, help, _watch_options, _WATCH)


def _why_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder or URL")
    add_json(parser)


def _watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder or URL")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    about = f"time between looks; default {_LOOK_S:g}, at an object store {_LOOK_AT_STORE_S:g}"
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help=about)
    parser.add_argument("--json", action="store_true", help="print one picture as a JSON object and end")


def _why(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    run = open_run(options.run)
    found = run.why()
    if options.json:
        print_json({"run": run.id, **found.as_dict()})
        return 0
    head = f"run {run.id}: step {found.step}, {found.held:.0f} worker-seconds held, {found.goodput:.1%} of them in new steps"
    lines = [head]
    for number, one in enumerate(found.findings, 1):
        lines += [f"{number}. {one.describe()}", f"   try: {one.remedy}"]
    if not found.findings:
        lines.append("nothing is known yet: the run has trained no step")
    lines += [f"not measured: {one}" for one in found.not_measured]
    print(printable(redacted("\n".join(lines))))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from springtide.run.folder import open_run

    if not 0 <= options.every <= 3600:
        raise ConfigError(explain("--every", options.every, "must be 0 to 3600 seconds", "omit it for the default"))
    run = open_run(options.run)
    watcher = _Watcher(run)
    if options.once or options.json:
        watcher.look()
        if options.json:
            print_json({"run": run.id, **watcher.picture()._asdict()})
        else:
            console = Console(highlight=False, markup=False)
            console.print(watcher.table(console.width, "utf" not in console.encoding))
        return 0
    every_s = options.every or (_LOOK_S if run.folder.is_local else _LOOK_AT_STORE_S)
    with contextlib.suppress(KeyboardInterrupt):  # this is how a person ends it; the run trains on
        _follow(watcher, Console(highlight=False, markup=False), every_s)
    return 0


class _Watcher:
    """Follows one run."""

    def __init__(self, run: Run) -> None:
        from springtide.run.watch import WatchedRun
        from springtide.track.journal_reader import JournalReader
        from springtide.track.ledger import Prices

        config = run.config
        self.run = run
        self._journal = JournalReader(run.folder)
        self._watched: WatchedRun = WatchedRun(config.num_steps, Prices.set_in(config.track))
        self._trouble = ""
        self._looked_at_lease_s = time.monotonic()
        self._ended = ""
        """Why the run is over although its journal does not say so."""

    def look(self, patient: bool = False) -> list[str]:
        """Read what is new; returns its events as lines. ``patient``: keep a storage error for the next picture."""
        said = list[str]()
        try:
            if self._journal.read():
                said = self._watched.take(self._journal.new)
                self._looked_at_lease_s, self._ended = time.monotonic(), ""
            elif time.monotonic() - self._looked_at_lease_s > _LOOK_AT_LEASE_S:
                self._look_at_lease()
            self._trouble = ""
        except OSError as error:
            if not patient:
                raise
            self._trouble = f"the run's folder cannot be read, trying again: {error}"
        return said

    def _look_at_lease(self) -> None:
        from springtide.checkpoint import leases

        self._looked_at_lease_s = time.monotonic()
        try:
            last = leases.newest(self.run.folder)
            if last is not None and (last.driver or not last.trains):  # torchrun has no driver
                self._ended = leases.why_over(self.run.folder) or ""
        except (FileNotFoundError, SpringtideError):  # damaged, or of another version: the journal still counts
            return

    def picture(self) -> Picture:
        """Return the run as it is now."""
        found = self._watched.picture(time.time())
        return found._replace(state=f"{found.state}; {self._ended}", is_over=True) if self._ended else found

    def line(self) -> str:
        """Return the run in one line."""
        from springtide.events.metrics import utilisation

        now = self.picture()
        parts = [f"step {now.step}/{now.num_steps}", now.state]
        if now.loss is not None:
            parts += [f"loss {now.loss:.4f}", f"{now.tokens_per_s:,.0f} tokens/s", f"MFU {utilisation(now.mfu)}"]
        parts += [f"{now.workers} workers", f"goodput {now.goodput:.1%}"]
        return _clean("  ".join([*parts, *([self._trouble] if self._trouble else [])]))

    def table(self, width: int = _LONGEST_CURVE, is_plain: bool = False) -> Table:
        """Return the run as a table that fits any width. ``width``: of the terminal."""
        from rich.table import Table
        from rich.text import Text

        from springtide.events.metrics import utilisation
        from springtide.run.watch import span

        now = self.picture()
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")

        def row(name: str, text: str) -> None:
            table.add_row(name, Text(_clean(text)))

        row("run", self.run.id)
        row("state", now.state)
        if self._trouble:
            row("store", self._trouble)
        left = f", {span(now.left_s)} left" if now.left_s else ""
        row("step", f"{now.step}/{now.num_steps}{left}")
        if now.loss is not None:
            curve = sparkline(
                now.losses, min(_LONGEST_CURVE, max(8, width - 24)), _PLAIN_LEVELS if is_plain else _LEVELS
            )
            row("loss", f"{now.loss:.4f} {curve}")
            row("speed", f"{now.tokens_per_s:,.0f} tokens/s, MFU {utilisation(now.mfu)}")
        changes = ", ".join(f"{workers} from step {step}" for step, workers in now.sizes)
        row("workers", f"{now.workers}" + (f" ({changes})" if len(now.sizes) > 1 else ""))
        row("saved", f"{now.checkpoint}, {span(now.checkpoint_age_s)} ago" if now.checkpoint else "no checkpoint yet")
        row("cost", f"goodput {now.goodput:.1%}" + (f", {now.dollars:,.2f} $" if now.dollars else ""))
        if now.limit:
            row("limit", now.limit)
            row("try", now.remedy)
        for number, message in enumerate(now.messages):
            row("events" if not number else "", message)
        return table


def _follow(watcher: _Watcher, console: Console, every_s: float) -> None:
    """Show the run until it is over: in place on a terminal, elsewhere a line for each change."""
    if not console.is_terminal or console.is_dumb_terminal:
        _print_lines(watcher, every_s)
        return
    from rich.live import Live

    is_plain = "utf" not in console.encoding
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            watcher.look(patient=True)
            live.update(watcher.table(console.width, is_plain), refresh=True)
            if watcher.picture().is_over:
                return
            time.sleep(every_s)


def _print_lines(watcher: _Watcher, every_s: float) -> None:
    before, is_first = "", True
    while True:
        for message in watcher.look(patient=True):
            if not is_first:  # history is in the journal
                print(_clean(message), flush=True)
        line, is_first = watcher.line(), False
        if line != before:
            print(line, flush=True)
            before = line
        if watcher.picture().is_over:
            return
        time.sleep(every_s)


def sparkline(values: list[float], width: int, levels: str = _LEVELS) -> str:
    """Return ``values`` as a line of at most ``width`` characters, the least as the lowest of ``levels``.

    Examples:
        >>> sparkline([1.0, 2.0, 3.0, 8.0], 4)
        '▁▂▃█'
    """
    count = min(width, len(values))
    parts = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = [sum(part) / len(part) for part in parts]
    least = min(means, default=0.0)
    whole = max(means, default=0.0) - least or 1.0
    return "".join(levels[round((mean - least) / whole * (len(levels) - 1))] for mean in means)


def _clean(text: str) -> str:
    return printable(redacted(text)).replace("\n", " ")
