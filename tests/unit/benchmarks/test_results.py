"""RESULTS.md is what the rows say, and a new run replaces its own rows alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[3] / "benchmarks" / "results.py"
_SPEC = importlib.util.spec_from_file_location("results", FILE)
assert _SPEC is not None
results = importlib.util.module_from_spec(_SPEC)
assert _SPEC.loader is not None
_SPEC.loader.exec_module(results)
RUN = [{"name": "a", "value": 1.0, "goal": 2.0, "better": "higher", "holds": False, "detail": {}}]
FIELDS = {"name", "about", "value", "unit", "goal", "better", "date", "commit", "machine", "command", "source"}


def test_the_page_is_made_from_rows_that_are_whole() -> None:
    found = results.rows()
    assert results.PAGE.read_text() == results.page(found), "run python benchmarks/results.py"
    for benchmark, table in found.items():
        for row in table:
            assert row.keys() == FIELDS, (benchmark, row)
            assert row["date"]
            assert row["better"] in ("higher", "lower")


def test_a_run_replaces_its_rows_and_keeps_the_others() -> None:
    facts = {"date": "2026-01-02", "commit": "c", "machine": "m", "command": "run", "source": ""}
    old = results.recorded([], [*RUN, {**RUN[0], "name": "b", "better": "lower"}], facts)
    old[0]["about"] = "tokens/s over a peer's"
    new = results.recorded(old, [{**RUN[0], "value": 3.0}], {**facts, "date": "2026-01-03"})
    assert [(row["name"], row["value"], row["date"], row["about"]) for row in new] == [
        ("a", 3.0, "2026-01-03", "tokens/s over a peer's"),
        ("b", 1.0, "2026-01-02", ""),
    ]
    assert [results.is_met(row) for row in (*old, *new)] == [False, True, True, True]
    assert results.page({"x": new}).count("\n| x |") == 2
