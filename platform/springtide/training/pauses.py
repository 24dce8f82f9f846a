"""Pauses between steps (``train.only_when``): by hour, battery or temperature of the machine of rank 0.

    rank 0 reads its sensors every few seconds -> flag in the step's all-reduce -> all ranks pause after the step. During the
    pause they exchange every few seconds whether rank 0 may continue, and whether a rank has a request to save, stop or leave

A pause ends only when the sensor is past the limit by a margin, so that a run at the limit does not pause again and again.
"""

from __future__ import annotations

import datetime
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from springtide.config.only_when import OnlyWhen, only_when
from springtide.distributed import World, gathered
from springtide.errors import ConfigError, explain
from springtide.events import Event, Paused, Resumed
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share
from springtide.training.requests import Requests

_FIELD = "pause"
_LOOK_S = 2.0
"""Time between reads of the sensors, and between exchanges during a pause [s]."""
_ROOM = 5
"""Margin at which a pause ends: degrees below the temperature limit, or percent above the battery limit."""


class Sensors(NamedTuple):
    """Functions that read the sensors of a machine. They return None if the machine has no such sensor."""

    hour: Callable[[], int]
    """Hour of the day, 0 to 23."""
    battery: Callable[[], tuple[float, bool] | None]
    """Charge of the battery [%], and whether the machine is plugged in."""
    temperature: Callable[[], float | None]
    """Temperature of the hottest sensor [degrees Celsius]."""


def sensors() -> Sensors:
    """Return the sensors of this machine that psutil can read."""
    return Sensors(lambda: datetime.datetime.now().hour, _battery, _temperature)


def _battery() -> tuple[float, bool] | None:
    found = _ask_psutil("sensors_battery")
    return None if found is None else (float(found.percent), bool(found.power_plugged))


def _temperature() -> float | None:
    found = _ask_psutil("sensors_temperatures") or {}
    return max((float(one.current) for some in found.values() for one in some), default=None)


def _ask_psutil(name: str) -> Any:
    try:
        psutil = importlib.import_module("psutil")  # psutil is optional
    except ImportError:
        return None
    function = getattr(psutil, name, None)  # psutil lacks some sensors on some systems
    return None if function is None else function()


def check_can_tell(text: str, machine: Sensors) -> None:
    """Raise ConfigError if ``text``, the value of ``train.only_when``, has a condition for which ``machine`` has no sensor."""
    wanted = only_when(text)
    for name, asked, known in (
        ("battery", wanted.battery, machine.battery),
        ("temperature", wanted.temperature, machine.temperature),
    ):
        if asked is not None and known() is None:
            problem = (
                f"this machine tells no {name}: it has no such sensor that psutil can read, or psutil is not installed"
            )
            raise ConfigError(explain("train.only_when", text, problem, f"omit {name}, or install psutil"))


def why_not(wanted: OnlyWhen, machine: Sensors, paused: bool = False) -> tuple[str, str] | None:
    """Return why ``machine`` may not train now, and until when; None if it may train. ``paused``: training is paused, so it may
    train only if the sensors are past the limits by the margin ``_ROOM``."""
    room = _ROOM if paused else 0
    if wanted.hours is not None:
        (begin, end), hour = wanted.hours, machine.hour()
        if not (begin <= hour < end if begin < end else hour >= begin or hour < end):
            return f"hour {hour} of the day is outside of {begin} to {end}", f"{begin % 24}:00"
    if wanted.battery is not None and (charge := machine.battery()) is not None:
        percent, plugged = charge
        if not plugged and percent < wanted.battery + room:
            until = f"it is plugged in, or has {wanted.battery + _ROOM} %"
            return f"the battery has {percent:.0f} %, the least is {wanted.battery} %", until
    degrees = None if wanted.temperature is None else machine.temperature()
    if wanted.temperature is not None and degrees is not None and degrees >= wanted.temperature - room:
        until = f"all sensors are below {wanted.temperature - _ROOM} degrees"
        return f"a sensor has {degrees:.0f} degrees, the limit is {wanted.temperature}", until
    return None


class Pauses(Part):
    """Pauses the training of one worker group while rank 0's machine does not meet ``train.only_when``."""

    def __init__(
        self,
        text: str,
        world: World,
        requests: Requests,
        heartbeat: Callable[[], None] = lambda: None,
        machine: Sensors | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``text``: value of ``train.only_when``. ``requests``: a request to any rank ends a pause. ``heartbeat``: called
        during a pause. ``machine``: sensors; None reads the sensors of this machine."""
        self._wanted, self._world, self._machine = only_when(text), world, machine or sensors()
        self._requests, self._heartbeat, self._clock, self._sleep = requests, heartbeat, clock, sleep
        self._looked_s = -_LOOK_S

    def contribute(self, message: StepMessage, share: Share) -> None:
        """On rank 0, add to the step's message whether to pause after this step."""
        pause = False
        if self._world.is_first and self._clock() - self._looked_s >= _LOOK_S:
            self._looked_s = self._clock()
            pause = why_not(self._wanted, self._machine) is not None
        message.any(_FIELD, pause)

    def between_steps(self, done: DoneStep) -> Iterator[Event]:
        """If rank 0 found a reason to pause, wait until the reason is gone or any rank has a request, such as to save or
        stop."""
        if not done.result.agreed[_FIELD]:
            return
        begin, told = self._clock(), False
        while True:
            mine = why_not(self._wanted, self._machine, paused=told) if self._world.is_first else None
            asked = self._requests.from_outside()
            everyone = gathered((mine, asked))
            if asked is not None:
                self._requests.ask(asked)
            reason = everyone[0][0]
            if reason is None or any(one for _, one in everyone):
                break
            if not told:
                yield Paused(step=done.step, reason=reason[0], until=reason[1])
            told = True
            self._heartbeat()
            self._sleep(_LOOK_S)
        if told:
            yield Resumed(step=done.step, paused_s=round(self._clock() - begin, 3), asked=reason is not None)
