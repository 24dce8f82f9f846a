"""One table says what Prometheus finds: names, kinds and labels agree, and the files in deploy/monitoring/ use nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from journal_events import step

from springtide.cli.main import main
from springtide.events import Commanded, Evaluated, Event, Failed, Left, Saved, Started, Stopped
from springtide.tracking.prometheus import CAUSES, EXPORTED, PROMETHEUS, RUN, observed, rows

REPOSITORY = Path(__file__).parents[3]
DASHBOARD = REPOSITORY / "deploy/monitoring/springtide-dashboard.json"
ALERTS = REPOSITORY / "deploy/monitoring/springtide-alerts.yml"


def told(event: Event) -> dict[str, float]:
    return {metric.name: value for metric, _, value in observed(event)}


def test_names_follow_prometheus_and_rows_of_one_name_agree() -> None:
    for row in PROMETHEUS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter")
        first = next(one for one in rows() if one.name == row.name)
        assert (row.kind, row.unit, row.labels) == (first.kind, first.unit, first.labels)
        assert first.meaning
        seconds_or_bytes = {"s": "_seconds", "bytes": "_bytes", "ratio": "_ratio"}.get(row.unit, "")
        assert row.name.endswith(seconds_or_bytes)


def test_each_event_tells_its_metrics() -> None:
    trained = told(step(3))
    assert trained["step"] == 3
    assert "skipped_updates_total" not in trained
    assert told(Started(step=0, world_size=4)) == {"workers": 4, "starts_total": 1}
    assert told(Stopped(step=4, status="finished")) == {"workers": 0}
    assert told(Failed(step=4, cause="lost nodes", reason="", again=True)) == {"workers": 0, "failures_total": 1}
    assert told(Left(step=4, kept_in="store")) == {"workers": 0}  # and a paused run is not one that stalls
    assert told(Saved(step=4, name="x", size_bytes=1, save_time_s=2.0, stall_s=0.5)) == {
        "checkpoint_step": 4,
        "save_seconds": 2.0,
        "save_stall_seconds": 0.5,
        "saves_total": 1,
    }


def test_numbers_that_are_not_finite_are_not_told_and_labels_stay_few() -> None:
    bad = Evaluated(step=1, heldout_loss=math.nan, heldout_bits_per_byte=math.inf, rows=1, tokens=1)
    assert told(bad) == {}
    for cause, label in (("hung", "hung"), ("made up by an error", "other")):
        failed = Failed(step=1, cause=cause, reason="", again=True)
        [labels] = [labels for metric, labels, _ in observed(failed) if metric.name == "failures_total"]
        assert labels == {"cause": label}
        assert label in CAUSES
    [(_, labels, _)] = observed(Commanded(step=1, verb="save", caller="me@here"))
    assert labels == {"verb": "save"}


@pytest.mark.parametrize("file", [DASHBOARD, ALERTS, REPOSITORY / "docs/how-to/monitor.md"], ids=lambda file: file.name)
def test_every_metric_that_is_named_is_exported(file: Path) -> None:
    named = set(re.findall(rf"{EXPORTED}\w+", file.read_text()))
    assert named
    assert named <= {f"{EXPORTED}{row.name}" for row in rows()}


def test_the_dashboard_has_a_panel_for_each_metric_side_by_side() -> None:
    """A counter is shown by its rate, and every query is of the runs that are selected."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert [panel["title"].replace(" ", "_") for panel in panels] == [row.name for row in rows()]
    for panel, row in zip(panels, rows(), strict=True):
        [query] = panel["targets"]
        selected = f'{EXPORTED}{row.name}{{{RUN}=~"$run"}}'
        rate = f"increase({selected}[$__rate_interval])"
        assert (rate if row.kind == "counter" else selected) in query["expr"]
        assert f"by ({', '.join(row.labels)})" in query["expr"]
        assert panel["description"] == f"{row.meaning} [{row.unit}]"
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_alerts_are_of_runs_and_say_what_to_do() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 6
    for rule in group["rules"]:
        assert f"by ({RUN})" in rule["expr"]
        assert re.search(rf"{EXPORTED}\w+", rule["expr"])
        assert rule["annotations"]["summary"].startswith(f"{{{{ $labels.{RUN} }}}}: ")


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    assert "ray_springtide_loss" in capsys.readouterr().out
