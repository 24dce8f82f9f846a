"""``springtide run``: show a run, and control a run that trains. ``springtide verify``, ``report``: prove which samples a run
trained on, and show its costs. ``springtide metrics``, ``queue``: list exported metrics, and the runs that share a cluster."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say, say_line
from springtide.errors import ConfigError, SpringtideError, explain, printable, redacted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from springtide.run.compare import Comparison
    from springtide.run.control import Verb
    from springtide.run.folder import Run
    from springtide.run.run_status import RunStatus, StatusBuilder

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
    """Add the group ``springtide run``, and the commands ``verify`` and ``report``."""
    group = commands.group("run", "Look at a run, and steer it while it trains.")
    add_views(group)
    for verb, (help, example) in _STEER.items():
        group.command(verb, functools.partial(_steer, verb), help, functools.partial(_steer_options, verb), example)
    help = "Prove that a run trained on exactly the samples it should have."
    commands.command("verify", _verify, help, _run_options, _VERIFY)
    help = "Print where the time of a run went, and what restarts cost."
    commands.command("report", _report, help, _run_options, _REPORT)


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
    if not run.folder.exists(REPORT):  # a run under torchrun has no driver that writes the report
        with contextlib.suppress(OSError):  # this user may lack the right to write to the folder
            run.write_report()
    say(f"  {run.report}" if run.folder.exists(REPORT) else "  report.html is not there, and cannot be written")
    return 0


# ``springtide run status``, ``run list`` and ``run compare``: one run, many runs, and two runs.

_STATUS = """  springtide run status runs/RUN             # how it stands, where its time went, what limits it and what to try
  springtide run status s3://bucket/runs/RUN --follow   # in place, until the run is over or Ctrl-C
  springtide run status runs/RUN --follow | tee log     # without a terminal: a line for each change
  springtide run status runs/RUN --json"""
_LIST = """  springtide run list runs
  springtide run list s3://bucket/runs --json"""
_COMPARE = """  springtide run compare runs/A runs/B       # settings, first step that differs, losses at equal tokens, costs
  springtide run compare runs/A runs/B --json"""
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.,-~=*#"
"""Characters of a sparkline, from low to high, for terminals without UTF-8."""
_LOOK_S, _LOOK_AT_STORE_S = 1.0, 5.0
"""Least time between two polls of a local folder, and of an object store [s]."""
_LOOK_AT_LEASE_S = 15.0
"""Time without new events after which the run's lease (a file that names the run's driver) is read. Only the lease shows that a
driver was killed, because a killed driver writes no last event [s]."""
_SHARE = 5
"""After a poll that took t seconds, pause for at least this many times t, so that polls take at most a sixth of the time. For a
long run with many restarts t is about 1 s."""
_LONGEST_CURVE = 60


def add_views(group: Commands) -> None:
    """Add the commands ``status``, ``list`` and ``compare`` to the group ``springtide run``."""
    help = "Show how a run stands: loss, workers, where its time went, and what limits it."
    group.command("status", _status, help, _status_options, _STATUS)
    group.command(
        "list", _list, "List the runs and sweeps below a root: state, step, loss, cost.", _list_options, _LIST
    )
    help = "Compare two runs: settings, samples, losses and costs."
    group.command("compare", _compare, help, _compare_options, _COMPARE)


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder or URL")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="show what is new until the run is over")
    how.add_argument("--json", action="store_true", help="print one JSON object")


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root", nargs="?", default="runs", help="folder or URL that holds runs, or of a sweep (default runs)"
    )
    add_json(parser)


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("other", help="another one")
    add_json(parser)


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    from springtide.run.folder import open_run

    run = open_run(options.run)
    watcher = _Watcher(run)
    console = Console(highlight=False, markup=False)
    if options.follow:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends only the display: the run continues
            _follow(watcher, console, _LOOK_S if run.folder.is_local else _LOOK_AT_STORE_S)
        return 0
    watcher.look()
    if options.json:
        print_json({"run": run.id, **watcher.status().as_dict()})
    else:
        console.print(watcher.table(watcher.status(), console))
    return 0


class _Watcher:
    """Follows one run: each poll reads only the new events in the run's journal."""

    def __init__(self, run: Run) -> None:
        from springtide.run.run_status import StatusBuilder
        from springtide.tracking.journal_reader import JournalReader
        from springtide.tracking.ledger import Prices

        config = run.config
        self.run = run
        self._journal = JournalReader(run.folder)
        self._builder: StatusBuilder = StatusBuilder(config.num_steps, Prices.set_in(config.track))
        self._trouble = ""
        self._looked_at_lease_s = time.monotonic()
        self._ended = ""
        """Why the run is over, if only its lease (a file that names the run's driver) shows it. A killed driver writes no last
        event to the journal. Empty if the lease does not show an end."""

    def look(self, patient: bool = False) -> list[str]:
        """Read new events of the run; return lines about them, but no lines about steps. ``patient``: show a storage error in
        the next status line instead of raising the error."""
        said = list[str]()
        try:
            if self._journal.read():
                said = self._builder.take(self._journal.new)
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
            if last is not None and (last.driver or not last.trains):  # a lease by torchrun has no driver to check
                self._ended = leases.why_over(self.run.folder) or ""
        except (FileNotFoundError, SpringtideError):  # the lease is damaged or of another version: rely on the journal
            return

    def status(self) -> RunStatus:
        """Return the current status of the run."""
        found = self._builder.status(time.time())
        if self._ended:
            return dataclasses.replace(found, state=f"{found.state}; {self._ended}", is_over=True)
        return found

    def looks(self, every_s: float) -> Iterator[tuple[list[str], RunStatus]]:
        """Poll until the run is over; yield lines about new events, and the run's status, after each poll."""
        while True:
            begun_s = time.monotonic()
            messages, now = self.look(patient=True), self.status()
            yield messages, now
            if now.is_over:
                return
            time.sleep(max(every_s, _SHARE * (time.monotonic() - begun_s)))

    def line(self, now: RunStatus) -> str:
        """Return the status ``now`` of the run in one line."""
        from springtide.events.metrics import utilisation

        parts = [f"step {now.step}/{now.num_steps}", now.state]
        if now.loss is not None:
            parts += [f"loss {now.loss:.4f}", f"{now.tokens_per_s:,.0f} tokens/s", f"MFU {utilisation(now.mfu)}"]
        parts += [f"held-out {now.heldout_loss:.4f}"] if now.heldout_loss is not None else []
        parts += [f"{now.workers} workers", f"{now.restarts} restarts", f"goodput {now.diagnosis.goodput:.1%}"]
        parts += [f"waits for {now.waits_for}"] if now.waits_for else []
        return _clean("  ".join([*parts, *([self._trouble] if self._trouble else [])]))

    def table(self, now: RunStatus, console: Console) -> Table:
        """Return the status ``now`` of the run as a table that fits the width of the terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        rows = [("run", self.run.id), ("state", now.state)]
        rows += [("store", self._trouble)] if self._trouble else []
        levels = _LEVELS if "utf" in console.encoding else _PLAIN_LEVELS
        curve = sparkline(now.losses, min(_LONGEST_CURVE, max(8, console.width - 24)), levels)
        for name, text in [*rows, *_progress(now, curve), *_costs(now)]:
            table.add_row(name, Text(_clean(text)))
        return table


def _progress(now: RunStatus, curve: str) -> list[tuple[str, str]]:
    """Return the progress of the run, such as step and loss, as rows of a table. ``curve``: a sparkline of the loss."""
    from springtide.events.metrics import utilisation
    from springtide.run.run_status import span

    rows = [("waits for", now.waits_for)] if now.waits_for else []
    rows.append(("step", f"{now.step}/{now.num_steps}" + (f", {span(now.left_s)} left" if now.left_s else "")))
    if now.loss is not None:
        rows.append(("loss", f"{now.loss:.4f} {curve}"))
    if now.heldout_loss is not None:
        rows.append(("held-out", f"{now.heldout_loss:.4f} at step {now.heldout_step}"))
    if now.loss is not None:
        rows.append(("speed", f"{now.tokens_per_s:,.0f} tokens/s, MFU {utilisation(now.mfu)}"))
    changes = ", ".join(f"{workers} from step {step}" for step, workers in now.sizes)
    rows.append(("workers", f"{now.workers}" + (f" ({changes})" if len(now.sizes) > 1 else "")))
    if (last := now.last_restart) is not None:
        figures = (
            f"{last.workers_before} -> {last.workers_after} workers, {last.gap_s:.1f} s without a step; {last.cause}"
        )
        rows.append(("restarts", f"{now.restarts}, {now.steps_lost} steps trained again; the last: {figures}"))
    age = f"{now.checkpoint}, {span(now.checkpoint_age_s)} ago" if now.checkpoint else "no checkpoint yet"
    return [*rows, ("saved", age)]


def _costs(now: RunStatus) -> list[tuple[str, str]]:
    """Return costs, shares of time, limits of the run with remedies, and the newest events, as rows of a table."""
    found = now.diagnosis
    rows = [("cost", f"goodput {found.goodput:.1%}" + (f", {now.dollars:,.2f} $" if now.dollars else ""))]
    if found.spent:
        rows.append(("time", ", ".join(f"{kind.replace('_', ' ')} {share:.1%}" for kind, share in found.spent.items())))
    for number, one in enumerate(found.findings, 1):
        rows += [(f"{number}.", one.describe()), ("try", one.remedy)]
    rows += [("not measured", one) for one in found.not_measured]
    return rows + [("events" if not number else "", message) for number, message in enumerate(now.messages)]


def _follow(watcher: _Watcher, console: Console, every_s: float) -> None:
    """Show the run until it is over: as an updated table on a terminal, elsewhere as a line for each change."""
    if console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for _, now in watcher.looks(every_s):
                live.update(watcher.table(now, console), refresh=True)
        return
    before = ""
    for messages, now in watcher.looks(every_s):
        for message in messages if before else ():  # the first poll returns old events: skip them
            say(_clean(message))
        if (line := watcher.line(now)) != before:
            say(line)
            before = line


def sparkline(values: list[float], width: int, levels: str = _LEVELS) -> str:
    """Draw ``values`` in one line of at most ``width`` characters; the least value is drawn as the first of ``levels``.

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


def _list(options: argparse.Namespace) -> int:
    from springtide.run.run_status import overview

    rows = overview(options.root)
    if options.json:
        print_json([row._asdict() for row in rows])
        return 0
    if not rows:
        say(f"no runs below {options.root}")
        return 0
    width = max(len(row.id) for row in rows)
    figures = (f"{'step':>15}", f"{'loss':>8}", "workers", "goodput", f"{'$':>9}", f"{'kWh':>9}")
    heads = (f"{'state':17}", *figures, "last event (UTC)", "where")
    say("  ".join((f"{'run':{width}}", *heads)))
    for row in rows:
        seen = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.seen_s)) if row.seen_s else "none"
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        found = [""] * 4  # the row of a sweep or an unreadable run is empty here
        if row.num_steps:
            found = [
                f"{row.workers}",
                f"{row.goodput:.1%}",
                f"{row.dollars:.2f}" if row.dollars else "",
                f"{row.energy_kwh:.3g}",
            ]
        step = f"{row.step}/{row.num_steps}" if row.num_steps else ""
        workers, goodput, dollars, energy = found
        say(
            f"{row.id:{width}}  {row.state:17}  {step:>15}  {loss:>8}  {workers:>7}  {goodput:>7}  "
            f"{dollars:>9}  {energy:>9}  {seen:16}  {row.where}".rstrip()
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
        say(f"identical: {found.common_steps} steps on the same samples, with the same losses bit for bit")
    else:
        for what, step in (("samples", found.first_other_samples), ("loss", found.first_other_loss)):
            where = "none" if step is None else f"step {step}"
            say(f"first step with other {what}: {where}, of {found.common_steps} that both have")
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
        say("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if found.changes_training:
        say("* changes what is learned")


def _figure(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# ``springtide queue``: the runs that share a cluster, and the workers of each run.

_QUEUE = """  RAY_ADDRESS=auto springtide queue                      # on one of its nodes: who has what, and waits for what
  RAY_ADDRESS=auto springtide queue --quota research=8   # its runs get at most 8 workers together; =none: no limit"""


def add_queue(commands: Commands) -> None:
    """Add the command ``springtide queue``."""
    help = "Show the runs that share a cluster by run.queue and run.priority, and set the quotas of queues."
    commands.command("queue", _queue, help, _queue_options, _QUEUE)


def _queue_options(parser: argparse.ArgumentParser) -> None:
    quota = "the most workers that all runs of a queue may have together; none: no limit; may be given again"
    parser.add_argument("--quota", metavar="QUEUE=N", action="append", default=[], help=quota)
    add_json(parser)


def _queue(options: argparse.Namespace) -> int:
    from springtide.api.queue import queue

    found = queue(dict(map(_quota, options.quota)))
    if options.json:
        print_json({"runs": [one._asdict() for one in found.rows], "quotas": found.quotas})
    else:
        say(found.describe())
    return 0


def _quota(text: str) -> tuple[str, int | None]:
    name, _, most = text.partition("=")
    if not name or not (most == "none" or most.isdecimal()):
        raise ConfigError(explain("--quota", text, "is not a queue and a number", "write research=8 or research=none"))
    return name, None if most == "none" else int(most)


# ``springtide metrics``: the metrics that runs export to Prometheus.

_EXAMPLES = "  springtide metrics                       # names, units and meanings"


def add_metrics(commands: Commands) -> None:
    """Add the command ``springtide metrics``."""
    commands.command("metrics", _metrics, "Print the metrics that Prometheus finds.", add_json, _EXAMPLES)


def _metrics(options: argparse.Namespace) -> int:
    from springtide.tracking.prometheus import EXPORTED, rows

    if options.json:
        keys = ("kind", "unit", "meaning", "labels")
        print_json({f"{EXPORTED}{row.name}": {key: getattr(row, key) for key in keys} for row in rows()})
    else:
        width = max(len(row.name) for row in rows()) + len(EXPORTED)
        for row in rows():
            name, labels = f"{EXPORTED}{row.name}", ", ".join(row.labels)
            say(f"{name:{width}}  {row.kind:7}  {row.unit:10}  {row.meaning} ({labels})")
    return 0
