"""The figures that stand, one row each, in ``results/*.json``; ``RESULTS.md`` is made from them.

    python benchmarks/step_overhead.py --json | python benchmarks/results.py step_overhead    # a new run replaces its rows
    python benchmarks/results.py                                                              # RESULTS.md again

A row keeps its place whether its goal was met or missed. A field that is not known is empty.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("RESULTS.md")
HEAD = """# Results

Each row is the newest run of a file in this folder: ours and the peer on the same work, alternating. Ratios hold; seconds are
those of one shared machine. What missed its goal stays: [why](../docs/explanation/measured.md). Made by
`python benchmarks/results.py` from `results/`.

| benchmark | figure | value | goal | met | date | commit | machine | command |
|---|---|---|---|---|---|---|---|---|
"""
Row = dict[str, Any]
"""name, about, value, unit, goal or None, better (higher or lower), date, commit, machine, command, source."""


def rows(folder: Path = FOLDER) -> dict[str, list[Row]]:
    """Return the rows of each benchmark, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def is_met(row: Row) -> bool | None:
    """Return whether a row's value meets its goal; None without a goal."""
    if row["goal"] is None:
        return None
    return row["value"] >= row["goal"] if row["better"] == "higher" else row["value"] <= row["goal"]


def page(found: dict[str, list[Row]]) -> str:
    """Return RESULTS.md."""
    made = []
    for benchmark, table in found.items():
        for row in table:
            figure = f"`{row['name']}`" + (f": {row['about']}" if row["about"] else "")
            unit = "" if row["unit"] in ("", "ratio") else f" {row['unit']}"
            goal = "" if row["goal"] is None else f"{row['goal']:g}"
            met = {None: "", True: "yes", False: "**no**"}[is_met(row)]
            cells = (
                benchmark,
                figure,
                f"{row['value']:,g}{unit}",
                goal,
                met,
                row["date"],
                row["commit"],
                row["machine"],
            )
            made.append(f"| {' | '.join(cells)} | `{row['command']}` |\n")
    return HEAD + "".join(made)


def lines(table: Iterable[Row]) -> str:
    """Return the text of a file of rows: one a line, so that a new run changes its lines alone."""
    return "[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n"


def recorded(old: Iterable[Row], claims: Iterable[dict[str, Any]], facts: dict[str, str]) -> list[Row]:
    """Return the rows of a benchmark after a run: each claim in the place of the row of its name, new ones at the end.

    Args:
        old: the rows before.
        claims: what the benchmark printed with ``--json``.
        facts: date, commit, machine, command and source of the run.
    """
    table = {row["name"]: row for row in old}
    for claim in claims:
        before = table.get(claim["name"], {"about": "", "unit": ""})
        figures = {key: claim[key] for key in ("name", "value", "goal", "better")}
        table[claim["name"]] = {**before, **figures, **facts}
    return list(table.values())


def main(arguments: list[str]) -> int:
    """Record a run from standard input, if a benchmark is named, and write RESULTS.md."""
    if arguments:
        [name] = arguments
        run = json.loads(sys.stdin.read().splitlines()[-1])
        if run["quick"]:
            raise SystemExit("--quick is no evidence: nothing is recorded")
        commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        facts = {
            "date": datetime.date.today().isoformat(),
            "commit": commit.stdout.strip(),
            "machine": f"{os.cpu_count()} cores",
            "command": f"benchmarks/{name}.py --json",
            "source": "",
        }
        table = recorded(rows().get(name, []), run["claims"], facts)
        (FOLDER / f"{name}.json").write_text(lines(table))
    PAGE.write_text(page(rows()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
