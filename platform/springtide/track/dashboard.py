"""The dashboard for Grafana and the alert rules for Prometheus, made from the table of metrics. Pure.

Ray exports a metric as ``ray_`` and its name; a run whose driver is started again has another series of the same run, so every
expression takes the largest of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from springtide.track.prometheus import PREFIX, PROMETHEUS, RUN, PrometheusMetric

EXPORTED = f"ray_{PREFIX}"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_UNITS = {
    "s": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "steps": "short",
    "tokens": "short",
    "tokens/s": "short",
}
"""Our unit -> Grafana's; others are shown as numbers."""


class Alert(NamedTuple):
    """An alert rule."""

    name: str
    expression: str
    """In PromQL; true for the runs that it is about."""
    for_: str
    """How long it must hold."""
    summary: str


def _newest(name: str) -> str:
    return f"max by ({RUN}) ({EXPORTED}{name})"


def _grown(name: str, time: str) -> str:
    return f"sum by ({RUN}) (increase({EXPORTED}{name}[{time}]))"


ALERTS = (
    Alert(
        "SpringtideStalled",
        f"max by ({RUN}) (changes({EXPORTED}step[15m])) == 0 and {_newest('workers')} > 0",
        "5m",
        "a run with workers has trained no step for 15 minutes: `springtide report` and its hangs/ folder say why",
    ),
    Alert(
        "SpringtideSavesFail",
        f"{_grown('failed_saves_total', '30m')} > 2",
        "0m",
        "saves fail: look at the store's quota, credentials and reachability",
    ),
    Alert(
        "SpringtideNoCheckpoint",
        f"{_newest('workers')} > 0 unless {_grown('saves_total', '30m')} > 0",
        "6h",
        "no checkpoint was committed for six hours: checkpoint.every_steps, or a store that is away",
    ),
    Alert(
        "SpringtideWaitsForData",
        f"max by ({RUN}) (avg_over_time({EXPORTED}data_wait_seconds[15m]) / avg_over_time({EXPORTED}step_seconds[15m])) > 0.2",
        "10m",
        "a fifth of each step waits for data: more CPUs on the nodes, feed.ahead, or a nearer store",
    ),
    Alert(
        "SpringtideRestartsOften",
        f"{_grown('starts_total', '1h')} > 10",
        "0m",
        "more than ten starts in an hour: `springtide report` lists the cause of each",
    ),
    Alert(
        "SpringtideSkipsUpdates",
        f"{_grown('skipped_updates_total', '15m')} > 10",
        "0m",
        "gradients are not finite, or spike: lower optim.peak_lr, or look at the data of these steps",
    ),
)


def rows() -> list[PrometheusMetric]:
    """Return the first row of each metric, in the order of the table.

    Examples:
        >>> [row.name for row in rows()][:3]
        ['step', 'tokens', 'loss']
    """
    found: dict[str, PrometheusMetric] = {}
    for row in PROMETHEUS:
        found.setdefault(row.name, row)
    return list(found.values())


def expression(row: PrometheusMetric) -> str:
    """Return the PromQL of a metric's panel, of the runs that the dashboard's variable selects.

    Args:
        row: of the table.

    Examples:
        >>> expression(rows()[0])
        'max by (run) (ray_springtide_step{run=~"$run"})'
    """
    by = ", ".join(row.labels)
    name = f'{EXPORTED}{row.name}{{{RUN}=~"$run"}}'
    return f"sum by ({by}) (increase({name}[$__rate_interval]))" if row.kind == "counter" else f"max by ({by}) ({name})"


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: a panel for each metric.

    Examples:
        >>> dashboard()["panels"][0]["title"]
        'step'
    """
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": row.name.replace("_", " "),
            "description": f"{row.meaning} [{row.unit}]",
            "datasource": source,
            "gridPos": {
                "x": number % _COLUMNS * _WIDTH,
                "y": number // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": _UNITS.get(row.unit, "short")}, "overrides": []},
            "targets": [
                {
                    "refId": "A",
                    "datasource": source,
                    "expr": expression(row),
                    "legendFormat": " ".join(f"{{{{{label}}}}}" for label in row.labels),
                }
            ],
        }
        for number, row in enumerate(rows())
    ]
    of_runs = f"label_values({EXPORTED}step, {RUN})"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "run",
            "type": "query",
            "datasource": source,
            "query": of_runs,
            "definition": of_runs,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
            "sort": 1,
        },
    ]
    return {
        "uid": "springtide",
        "title": "springtide",
        "tags": ["springtide", "ray"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def alert_rules() -> str:
    """Return the rules file, YAML, as Prometheus and promtool read it.

    Examples:
        >>> alert_rules().splitlines()[:2]
        ['groups:', '- name: springtide']
    """
    rules = [
        {
            "alert": one.name,
            "expr": one.expression,
            "for": one.for_,
            "labels": {"severity": "warning"},
            "annotations": {"summary": f"{{{{ $labels.{RUN} }}}}: {one.summary}"},
        }
        for one in ALERTS
    ]
    return yaml.safe_dump({"groups": [{"name": "springtide", "rules": rules}]}, sort_keys=False, width=200)
