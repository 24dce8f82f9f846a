"""Settings and metrics carry their units, and every event is charged to a kind of time."""

from __future__ import annotations

import dataclasses
import re

from springtide.config.fields import fields
from springtide.events import EVENTS, Evaluated, StepDone
from springtide.events.metrics import EVAL_METRICS, EXTRA_METRICS, SOURCE_EVAL_METRICS, STEP_METRICS
from springtide.tracking.ledger import KINDS


def test_every_field_has_a_doc_line_that_ends_with_its_unit() -> None:
    missing = [name for name, field in fields().items() if not re.search(r"\[[^\]]+\]\.$", field.description or "")]
    assert missing == []


def test_metrics_are_those_of_the_events_and_their_names_agree_with_their_units() -> None:
    def figures(event: type) -> set[str]:
        ours = {
            "step",
            "step_tokens",
            "time_s",
            "term",
            "rows",
            "corpora",
            "losses",
            "forgetting",
            "asynchronous",
            "digest",
            "updated",
            "extra",
        }
        return {field.name for field in dataclasses.fields(event)} - ours

    assert figures(StepDone) == STEP_METRICS.keys()
    assert figures(Evaluated) - {"tokens"} == EVAL_METRICS.keys()
    for name, metric in (STEP_METRICS | EXTRA_METRICS | EVAL_METRICS | SOURCE_EVAL_METRICS).items():
        if name.endswith("_per_s"):
            assert metric.unit.endswith("/s"), name
        elif name.endswith("_s"):
            assert metric.unit == "s", name
        if name.endswith("_bytes"):
            assert metric.unit == "bytes", name


def test_every_event_is_charged_to_a_kind_of_time() -> None:
    assert {event.charged_to for event in EVENTS.values()} <= set(KINDS)
