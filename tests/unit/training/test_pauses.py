"""Pauses between steps: when, until when, and what ends them. Clock and sensors are given."""

from __future__ import annotations

import sys

import pytest
import torch
from stepping import contributed, done_step, result_of

from springtide import Config
from springtide.config.only_when import OnlyWhen, only_when
from springtide.distributed import World
from springtide.elastic import GroupRequest
from springtide.errors import ConfigError
from springtide.events import Event, Paused, Resumed
from springtide.training import pauses
from springtide.training.pauses import Pauses, Sensors, check_can_tell, why_not
from springtide.training.requests import Requests

ALL = "hours 22-6, battery 30, temperature 80"


def machine(
    hour: int = 23, battery: tuple[float, bool] | None = (50.0, False), degrees: float | None = 60.0
) -> Sensors:
    return Sensors(lambda: hour, lambda: battery, lambda: degrees)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", OnlyWhen()),
        (ALL, OnlyWhen((22, 6), 30, 80)),
        (" temperature 70,hours 8 - 18 ", OnlyWhen((8, 18), None, 70)),
    ],
)
def test_a_text_names_conditions(text: str, found: OnlyWhen) -> None:
    assert only_when(text) == found
    assert Config().override({"train.only_when": text}).train.only_when == text


@pytest.mark.parametrize(
    "text", ["nights", "hours 6-6", "hours 6-25", "battery 100", "temperature 5", "battery 20, battery 30"]
)
def test_a_text_that_names_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.only_when = .*'hours 22-6, battery 30, temperature 80'"):
        Config().override({"train.only_when": text})


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (machine(), None),
        (machine(hour=5), None),
        (machine(hour=6), ("hour 6 of the day is outside of 22 to 6", "22:00")),
        (machine(battery=(29.0, False)), ("the battery has 29 %, the least is 30 %", "it is plugged in, or has 35 %")),
        (machine(battery=(3.0, True)), None),
        (machine(degrees=80.0), ("a sensor has 80 degrees, the limit is 80", "all sensors are below 75 degrees")),
    ],
    ids=["all hold", "night", "day", "low", "plugged in", "hot"],
)
def test_each_condition_has_to_hold(now: Sensors, told: tuple[str, str] | None) -> None:
    assert why_not(only_when(ALL), now) == told


def test_a_pause_ends_with_some_room() -> None:
    wanted = only_when("battery 30, temperature 80")
    for now in (machine(degrees=76.0), machine(battery=(34.0, False))):
        assert why_not(wanted, now) is None
        assert why_not(wanted, now, paused=True) is not None
    assert why_not(wanted, machine(degrees=74.0), paused=True) is None


def test_what_the_machine_cannot_tell_is_refused_with_the_reason() -> None:
    check_can_tell(ALL, machine())
    check_can_tell("hours 1-2", machine(battery=None, degrees=None))
    with pytest.raises(ConfigError, match=r"no battery"):
        check_can_tell(ALL, machine(battery=None))
    with pytest.raises(ConfigError, match=r"no temperature"):
        check_can_tell(ALL, machine(degrees=None))


class Day:
    """A machine that cools down by a degree a second, and a clock that moves only where somebody sleeps."""

    def __init__(self, degrees: float, asked_at: float = 1e9) -> None:
        self.now, self.degrees, self.asked_at = 0.0, degrees, asked_at
        self.sleeps: list[float] = []
        self.beats = 0
        self.requests = Requests()

    def hook(self, rank: int = 0, size: int = 1) -> Pauses:
        here = machine()._replace(temperature=lambda: self.degrees - self.now)
        world = World(rank, size, torch.device("cpu"))
        self.requests.from_outside = self.asked
        return Pauses("temperature 80", world, self.requests, self.beat, here, lambda: self.now, self.sleep)

    def asked(self) -> GroupRequest | None:
        return GroupRequest.STOP if self.now >= self.asked_at else None

    def beat(self) -> None:
        self.beats += 1

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def pause(hook: Pauses) -> bool:
    """What a step agrees on."""
    return bool(contributed(hook, world=hook._world)["pause"])


def after(hook: Pauses, pause: bool) -> list[Event]:
    return list(hook.between_steps(done_step(3, result_of({"pause": pause}))))


def test_a_pause_lasts_until_the_machine_is_cool() -> None:
    """A pause is told once and lasts until the machine is cool."""
    day = Day(degrees=90.0)
    hook = day.hook()
    assert pause(hook)
    paused, resumed = after(hook, True)
    assert paused == Paused(
        step=3, reason="a sensor has 90 degrees, the limit is 80", until=paused.until, time_s=paused.time_s
    )
    assert "PAUSED, a sensor has 90 degrees, the limit is 80; until all sensors are below 75" in paused.describe()
    assert isinstance(resumed, Resumed)
    assert (resumed.paused_s, resumed.asked) == (16.0, False)
    assert (day.sleeps, day.beats) == ([2.0] * 8, 8), "it sleeps between looks, and is alive"
    assert not pause(hook)
    assert after(hook, False) == []


def test_sensors_are_not_read_at_each_step() -> None:
    day = Day(degrees=90.0)
    hook = day.hook()
    assert [pause(hook) for _ in range(3)] == [True, False, False]


def test_a_request_ends_a_pause_and_reaches_the_next_step() -> None:
    day = Day(degrees=1000.0, asked_at=4.0)
    hook = day.hook()
    paused, resumed = after(hook, pause(hook))
    assert isinstance(paused, Paused)
    assert isinstance(resumed, Resumed)
    assert resumed.asked
    assert "request" in resumed.describe()
    day.asked_at = 1e9
    assert [contributed(day.requests)["request: stop"] for _ in range(2)] == [True, False]


def test_other_ranks_do_what_rank_0_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own sensors do not count: here rank 1 is hot, and rank 0 says when to go on."""
    answers: list[tuple[str, str] | None] = [("hot", "it is cool"), ("hot", "it is cool"), None]

    def gathered(value: tuple[object, object]) -> list[tuple[object, object]]:
        assert value[0] is None
        return [(answers.pop(0), None), value]

    monkeypatch.setattr(pauses, "gathered", gathered)
    day = Day(degrees=1000.0)
    hook = day.hook(rank=1, size=2)
    assert not pause(hook)
    assert [one.describe() for one in after(hook, True)] == [
        "step 3: PAUSED, hot; until it is cool",
        "step 3: resumes after a pause of 4 s",
    ]


def test_what_a_machine_without_psutil_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    here = pauses.sensors()
    assert (here.battery(), here.temperature()) == (None, None)
    assert 0 <= here.hour() < 24
