"""No file and no answer of ours has a NaN or an infinity in it: most readers of JSON refuse the whole of it."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_events import step

import springtide
from springtide import config as configs
from springtide.checkpoint.format import Meta
from springtide.checkpoint.retention import being_read, hold
from springtide.events.record import EVENTS, event, record
from springtide.storage import Folder, most_values, plain_json, to_json
from springtide.tracking.journal import Journal, read_journal
from springtide.tune import Rung, TrialOutcome, rank_trials, read

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def strictly(text: str) -> Any:
    """As a browser parses it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(values)
def test_what_is_not_finite_is_null_and_all_else_stays(value: Any) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items()}
        if isinstance(value, list):
            return [without(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    assert strictly(to_json(value)) == without(value)


@given(values, st.integers(1, 9), st.booleans())
def test_values_are_counted_without_parsing(value: Any, part_bytes: int, ascii_only: bool) -> None:
    def count(value: Any) -> int:
        inner = list(value.values() if isinstance(value, dict) else value) if isinstance(value, dict | list) else []
        return 1 + sum(map(count, inner)) + (isinstance(value, dict | list) and not inner)

    text = json.dumps(value, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_json, "_PART_BYTES", part_bytes)
        found = most_values(text.encode("utf-8", "surrogatepass"))
    assert found == count(value)


def test_every_dump_in_the_package_is_json() -> None:
    """``json.dumps`` writes NaN unless it is told not to."""
    found = []
    for path in Path(springtide.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                strict = [one for one in node.keywords if one.arg == "allow_nan" and ast.unparse(one.value) == "False"]
                if not strict and path.name != "tokenizer.py":  # it only looks for a character
                    found.append(f"{path.name}:{node.lineno} use springtide.storage.to_json")
    assert found == []


@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_with_nan_in_every_number_is_read_again(kind: str) -> None:
    made: dict[str, Any] = {"kind": kind}
    kinds = {"float": math.nan, "dict[str, float]": {"a": math.nan, "b": 1.0}, "list[float]": [math.nan, 1.0]}
    for field in dataclasses.fields(EVENTS[kind]):
        type_name = str(field.type)
        empty: Any = [] if type_name.startswith(("list", "tuple")) else {} if type_name.startswith("dict") else 1
        made[field.name] = kinds.get(type_name, {"str": "x", "bool": True}.get(type_name, empty))
    first = event(made)
    again = event(strictly(to_json(record(first))))
    assert repr(again) == repr(first)


def test_a_journal_with_a_loss_that_is_no_number_is_json(tmp_path: Path) -> None:
    one = dataclasses.replace(step(1), loss=math.nan, grad_norm=math.inf)
    with Journal(Folder(str(tmp_path))) as journal:
        journal(one)
    [segment] = (tmp_path / "journal").iterdir()
    [line] = segment.read_text().splitlines()
    assert strictly(line)["loss"] is None
    [read] = read_journal(Folder(str(tmp_path)))
    assert math.isnan(read.loss)  # type: ignore[attr-defined]


def test_the_verdict_of_a_sweep_is_json_before_anything_is_known_of_its_trials() -> None:
    table = {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": 2, "tokens_per_trial": 40_000, "rungs": 4},
    }
    sweep = read(table, configs.recipes.tiny())
    rungs = (Rung(400, 40_000, 2.0),)
    known = TrialOutcome(0, {"optim.peak_lr": 0.01}, "finished", rungs)
    new = TrialOutcome(1, {"optim.peak_lr": 0.02}, "stopped", ())
    found = strictly(to_json(rank_trials(sweep, [known, new]).as_dict()))
    assert [one["value"] for one in found["trials"]].count(None) == 1


def test_a_checkpoint_that_is_kept_for_good_says_so_in_json(tmp_path: Path) -> None:
    run = Folder(str(tmp_path))
    hold(run, "step-0000000001", "branch")
    [note] = (tmp_path / "checkpoints").rglob("*.branch")
    strictly(note.read_text())
    assert being_read(run) == {"step-0000000001"}
    note.write_text('{"until_s": Infinity}')  # of a version before
    assert being_read(run) == {"step-0000000001"}


def test_a_loss_that_is_no_number_does_not_make_a_checkpoint_unreadable() -> None:
    figures = {"loss": math.nan, "heldout_loss": math.inf, "good": 2.0}
    meta = Meta(step=1, tokens=1, world_size=1, order_identity="", config_fingerprint="", metrics=figures)
    assert meta.metrics == {"good": 2.0}
    text = meta.model_dump_json()
    assert Meta.model_validate(strictly(text)) == meta
    before = text.replace('"good":2.0', '"loss":null,"good":2.0')  # as a version before wrote it
    assert Meta.model_validate_json(before) == meta
    with pytest.raises(ValueError, match="metrics"):
        Meta.model_validate_json(text.replace("2.0", '"two"'))
