"""One table says what Prometheus finds: names, kinds and labels agree, and the dashboard and the alerts use nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from journal_events import step

from springtide.cli.main import main
from springtide.events import Commanded, Evaluated, Event, Failed, Left, Saved, Started, Stopped
from springtide.track.dashboard import ALERTS, EXPORTED, alert_rules, dashboard, expression, rows
from springtide.track.prometheus import CAUSES, PROMETHEUS, RUN, observed


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


def test_the_dashboard_has_a_panel_for_each_metric_side_by_side() -> None:
    panels = dashboard()["panels"]
    assert [panel["targets"][0]["expr"] for panel in panels] == [expression(row) for row in rows()]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_alerts_are_of_metrics_that_exist() -> None:
    names = {f"{EXPORTED}{row.name}" for row in rows()}
    [group] = yaml.safe_load(alert_rules())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [one.name for one in ALERTS]
    for rule in group["rules"]:
        found = set(re.findall(rf"{EXPORTED}\w+", rule["expr"]))
        assert found
        assert found <= names
        assert f"by ({RUN})" in rule["expr"]


def test_the_command_prints_the_table_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    assert "ray_springtide_loss" in capsys.readouterr().out
    assert main(["metrics", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"springtide-dashboard.json", "springtide-alerts.yml"}
