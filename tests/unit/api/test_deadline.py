"""A deadline that cannot be, or lacks what it needs, is refused before anything is written."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import yaml

from springtide import config as configs
from springtide.api.resolve import begun_s, check_deadline, remarks_on_markets
from springtide.config import Config
from springtide.config.quantities import Until
from springtide.errors import ConfigError
from springtide.events import Started
from springtide.ray.cluster import nodes
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal

PRICES = {"track.price": 3.0, "track.spot_price": 1.0}


def config(**changes: Any) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return configs.recipes.tiny().override({"elastic.deadline": "8h", **PRICES, **named})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"elastic__deadline": "2020-01-01T00:00Z"},
            r"elastic.deadline = '2020-.*: is over since .* h; give a later one",
        ),
        (
            {"elastic__deadline": "500d"},
            r"elastic.deadline = '43200000s': is 500 days away, more than a year; give an earlier",
        ),
        (
            {"track__price": 0},
            r"track.price = 0.0: is missing, and elastic.deadline = '28800s' weighs costs; give the dollars",
        ),
        ({"track__spot_price": 0}, r"track.spot_price = 0.0: is missing"),
        (
            {"track__spot_price": 3.0},
            r"track.spot_price = 3.0: is not less than track.price \(3\), so spot nodes save nothing",
        ),
        ({"run__queue": "team"}, r"run.queue = 'team': shares the nodes of both markets"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(changes: dict[str, Any], problem: str) -> None:
    run = Run(Folder("memory://none"))
    check_deadline(config(), run)
    with pytest.raises(ConfigError, match=problem):
        check_deadline(config(**changes), run)
    check_deadline(config(**{"track__price": 0, **changes, "elastic__deadline": 0}), run)


def test_a_span_counts_from_the_first_start_across_resumes() -> None:
    """A span counts from the first start however often the run is resumed."""
    folder = Folder("memory://begun")
    assert begun_s(Run(folder)) == pytest.approx(time.time(), abs=5.0)
    for term, ago_s in ((1, 9 * 3600.0), (2, 10.0)):
        with Journal(folder, term=term) as journal:
            journal(Started(step=0, world_size=1, time_s=time.time() - ago_s))
    assert time.time() - begun_s(Run(folder)) == pytest.approx(9 * 3600.0, abs=5.0)
    with pytest.raises(ConfigError, match=r"elastic\.deadline = '28800s'.*(3600 s|1\.0 h)"):
        check_deadline(config(), Run(folder))
    check_deadline(config(elastic__deadline="10h"), Run(folder))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("8h", "28800s"),
        (" 1.5d ", "129600s"),
        (1234567.5, "1234567.5s"),
        (0, "0s"),
        ("2026-12-01T08:00Z", "2026-12-01T08:00:00+00:00"),
        ("2026-12-01 09:00+01:00", "2026-12-01T09:00:00+01:00"),
    ],
)
def test_a_time_survives_the_config_file(given: Any, kept: str) -> None:
    found = config(elastic__deadline=given).elastic
    assert found.deadline == kept
    assert type(found.model_dump(mode="json")["deadline"]) is str
    again = yaml.safe_load(yaml.safe_dump(found.model_dump(mode="json")))["deadline"]
    assert Until.parse(again) == kept
    assert found.deadline.is_set == bool(given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("2026-12-01T08:00", "has no offset from UTC; write 2026-12-01T08:00Z or"),
        (datetime.datetime(2026, 12, 1), "has no offset from UTC"),
        (datetime.date(2026, 12, 1), "is a day without a time"),
        ("2026-13-01T08:00Z", "is not a time such as 2026-12-01T08:00Z"),
        ("soon", "is not an amount of seconds"),
        ("-3h", "is not an amount of seconds"),
        (True, "is not an amount of seconds"),
    ],
)
def test_what_is_no_time_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(elastic__deadline=given)


def test_times_of_all_zones_are_equivalent() -> None:
    """Times of all zones are one and a span begins at the start."""
    utc, berlin = Until.parse("2026-12-01T08:00Z"), Until.parse("2026-12-01T09:00+01:00")
    assert utc.at_s(0.0) == berlin.at_s(5.0) == 1796112000.0
    assert Until.parse("8h").at_s(100.0) == 28900.0


def test_nodes_of_an_unknown_market_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, str] = {"a": "spot", "b": "on-demand", "c": "preemptible"}
    monkeypatch.setattr(nodes, "markets", lambda: here)
    assert remarks_on_markets(config()) == []
    here |= {"d": "", "e": ""}
    [said] = remarks_on_markets(config())
    assert said.startswith("elastic.deadline: 2 of 5 nodes")
    here |= {"d": "reserved"}
    assert "(reserved)" in remarks_on_markets(config())[0]
    assert remarks_on_markets(config(elastic__deadline=0)) == []
