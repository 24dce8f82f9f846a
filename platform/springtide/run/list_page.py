"""The runs below a root as a page: what trains where, how far, at what cost, with a link to the page of each."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

from springtide.errors import ConfigError, explain, redacted
from springtide.report.html import Cell, Link, cards, grid, page
from springtide.run.folder import REPORT
from springtide.run.overview import RunRow
from springtide.store import Folder

_HEADINGS = (
    *(("run", False), ("state", False), ("step", True), ("loss", True), ("where", False), ("workers now", True)),
    *(("goodput", True), ("$", True), ("kWh", True), ("last event (UTC)", False)),
)


def write_list_page(root: str, rows: Sequence[RunRow], out: str) -> None:
    """Write the page.

    Args:
        root: folder or URL of the runs.
        rows: as ``overview`` returns them.
        out: path or URL of the file. A row leads to its run's report if both are local, or ``out`` lies in ``root``.

    Raises:
        ConfigError: ``out`` is not the name of a file, or cannot be written.

    Examples:
        >>> from springtide.run.overview import overview
        >>> write_list_page("runs", overview("runs"), "runs/index.html")
        >>> b"<td>finished</td>" in Folder("runs").read("index.html")
        True
    """
    folder, _, name = out.rpartition("/")
    target = Folder(folder or ("/" if out.startswith("/") else "."))
    try:
        if not name:
            raise IsADirectoryError("it names a folder")
        target.write(name, list_page(root, rows, _prefix(Folder(root), target)))
    except OSError as error:
        raise ConfigError(
            explain("--out", out, f"cannot be written ({error})", "name a file, such as index.html")
        ) from None


def list_page(root: str, rows: Sequence[RunRow], prefix: str | None) -> str:
    """Return the page. ``prefix``: path from its folder to ``root``; None: rows lead nowhere."""
    shown = [(_cells(row, prefix), False) for row in rows]
    asked = time.strftime("As of %Y-%m-%d %H:%M UTC", time.gmtime())
    sections = [f"<p>{asked}</p>", cards(_figures(rows)), grid("Runs", _HEADINGS, shown)]
    return page(f"Runs in {redacted(root)}", sections)


def _prefix(root: Folder, target: Folder) -> str | None:
    if root == target:
        return ""
    return os.path.relpath(root.url, target.url) if root.is_local and target.is_local else None


def _figures(rows: Sequence[RunRow]) -> list[tuple[str, str, str]]:
    counts = Counter(row.state.partition(":")[0] for row in rows)
    found = [("runs", f"{len(rows):,}", ", ".join(f"{count:,} {state}" for state, count in counts.most_common()))]
    found.append(("workers now", f"{sum(row.workers for row in rows):,}", "of runs that train, or were killed"))
    if dollars := sum(row.dollars for row in rows):
        found.append(("dollars", f"{dollars:,.2f}", "at the prices that were set"))
    if kwh := sum(row.energy_kwh for row in rows):
        found.append(("energy", f"{kwh:,.3g} kWh", "that workers counted"))
    return found


def _cells(row: RunRow, prefix: str | None) -> list[Cell]:
    path = os.path.join(prefix, row.id, REPORT) if row.has_page and prefix is not None else ""
    seen = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.seen_s)) if row.seen_s else "none"
    loss, step = "" if row.loss is None else f"{row.loss:.4f}", f"{row.step:,}/{row.num_steps:,}"
    figures = [str(row.workers), f"{row.goodput:.1%}", f"{row.dollars:,.2f}", f"{row.energy_kwh:,.3g}"]
    return [Link(row.id, path) if path else row.id, row.state, step, loss, row.where, *figures, seen]
