"""Energy that a run uses, in joules. Each rank measures its own; the sum over ranks travels in the step's one all-reduce.

    nvml      energy counter of the rank's GPU: the card alone, without its host
    rapl      energy counters of the host's CPU packages and memory, split equally among the host's ranks; readable by root
    estimate  CPU time of the rank's process x a constant: the energy of computing, without the idle energy of the machine

The first of these sources that can be read is used. The energy is sent in the step's message before the step ends, so energy
used after the message counts in the next step. Not counted: energy used after the last message of a worker group, and energy of
a process before its training loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from springtide.distributed import World, gathered
from springtide.events import Event
from springtide.training.message import StepMessage
from springtide.training.nvml import Gpu, gpu_of
from springtide.training.part import DoneStep, Part, Share, StepResult, Work

_EVERY_S = 1.0
"""Least time between two reads of a hardware counter [s], because a read can take milliseconds. In between, the energy is
extrapolated from the power between the last two reads, and the next read corrects the difference."""
_MONITOR_EVERY_S = 30.0
"""Time between two reports of the GPU's state [s]."""
_CORE_W = 3.5
"""Power of a busy vCPU, which is a hyperthread [W]. Source: Cloud Carbon Footprint, methodology, "average max watts" of AWS;
GCP's is 4.26, Azure's 3.76."""
_MOST_W = 10_000.0
"""Power that no device or host of today reaches [W]. A counter that shows more was reset."""
_POWERCAP = Path("/sys/class/powercap")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_FIELDS = "energy_j", "energy_between_j"
"""Fields of the step's message and of the event ``StepDone``: energy of a step, and how much of it was used between the
previous step and this step [J]."""

_log = logging.getLogger(__name__)


class Counter(NamedTuple):
    """An energy counter: its name, how to read it, and the host whose ranks share it."""

    name: str
    joules: Callable[[], float]
    """Returns the energy used since a fixed moment [J]. Raises OSError if the counter cannot be read."""
    every_s: float = _EVERY_S
    """Least time between two reads [s]."""
    host: str = ""
    """Id of the host whose ranks share this counter; empty if the counter is this rank's alone."""


class Rapl:
    """The RAPL counters of this host's CPU packages, and of its memory where memory has separate counters."""

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        """``powercap``: folder of the RAPL zones. Raises OSError if it has no zone that this user may read."""
        self._zones: list[tuple[Path, float]] = []
        self._last: list[float] = []
        self._joules = 0.0
        for zone in sorted(powercap.glob("intel-rapl:*")):
            # the zones "core" and "psys" would count twice: "core" is a part of its package, and "psys" contains the packages
            if (zone / "name").read_text().strip().startswith(("package", "dram")):
                self._zones.append((zone / "energy_uj", _microjoules(zone / "max_energy_range_uj")))
        if not self._zones:
            raise FileNotFoundError(f"no RAPL zones in {powercap}")
        self._last = [_microjoules(zone) for zone, _ in self._zones]

    def joules(self) -> float:
        """Return the energy that the host has used since this object was made [J]. Call it at least every 15 minutes: if a
        counter wraps to 0 twice between two calls, only one wrap is noticed, and the result is too low."""
        for number, (zone, most) in enumerate(self._zones):
            now = _microjoules(zone)
            passed, self._last[number] = now - self._last[number], now
            self._joules += (passed if passed >= 0 else passed + most) / 1e6
        return self._joules


def _microjoules(file: Path) -> float:
    try:
        return float(file.read_text())
    except ValueError as error:
        raise OSError(f"{file} holds no number") from error


def counter_of(gpu: Gpu | None, device_type: str = "cpu", powercap: Path = _POWERCAP) -> Counter:
    """Return the best energy counter that can be read here: NVML, RAPL, or an estimate. ``gpu``: this rank's GPU; None without
    NVML. ``device_type``: type of device that this rank trains on, ``cpu`` or ``cuda``. ``powercap``: folder of the RAPL
    zones."""
    if gpu is not None:
        try:
            gpu.joules()
            return Counter("nvml", gpu.joules)
        except OSError as error:
            _log.info("this GPU's energy is not counted: %s", error)
    without = ", without the GPU" * (device_type == "cuda")
    try:
        return Counter(f"rapl{without}", Rapl(powercap).joules, host=_BOOT_ID.read_text().strip())
    except OSError:
        name = f"estimate: {_CORE_W} W x CPU time{without}"
        return Counter(name, lambda: _CORE_W * time.process_time(), every_s=0.0)


class EnergyMeter(Part):
    """Measures this rank's energy, in steps and between steps separately, and checks its GPU every 30 s. Rank 0 reports all
    figures of its GPU; the other ranks log only critical errors."""

    def __init__(
        self,
        counter: Counter,
        share: float = 1.0,
        source: str = "",
        gpu: Gpu | None = None,
        clock: Callable[[], float] = time.monotonic,
        tells: bool = True,
    ) -> None:
        """``share``: this rank's share of the counter's energy, above 0 and at most 1. ``source``: text that names the energy
        sources of all ranks. ``gpu``: the GPU to check; None checks none. ``clock``: returns seconds. ``tells``: whether to
        report the GPU's figures."""
        self.started = {"energy_source": source or counter.name}
        self._counter, self._share, self._gpu, self._clock, self._tells = counter, share, gpu, clock, tells
        if gpu is not None:
            gpu.watch_xids()
        self._read_s = self._looked_s = clock()
        self._last_j, self._counted_j, self._told_j, self._power_w = counter.joules(), 0.0, 0.0, 0.0
        self._in_step_j = self._between_j = 0.0
        self._has_warned = False

    def before_step(self, work: Work) -> None:
        self._between_j += self._passed()

    def contribute(self, message: StepMessage, share: Share) -> None:
        for name, joules in zip(_FIELDS, self.take(), strict=True):
            message.sum(name, joules)

    def receive(self, result: StepResult) -> None:
        result.fields |= {name: round(result.agreed[name], 6) for name in _FIELDS}

    def take(self) -> tuple[float, float]:
        """Return the energy that this rank has used since the last call, and how much of it was used between steps [J]."""
        in_step_j, between_j = self._in_step_j + self._passed(), self._between_j
        self._in_step_j = self._between_j = 0.0
        return in_step_j + between_j, between_j

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Every 30 s, log the critical errors of this rank's GPU. On rank 0, also yield the GPU's figures."""
        self._in_step_j += self._passed()
        if self._gpu is not None and self._clock() - self._looked_s >= _MONITOR_EVERY_S:
            self._looked_s = self._clock()
            found = self._gpu.figures(done.step)
            if found.xids:
                _log.warning("the GPU's driver reported critical errors: XID %s", ", ".join(map(str, found.xids)))
            if self._tells:
                yield found

    def _passed(self) -> float:
        """Return this rank's energy since the last call [J]. Between two reads of the counter, the energy is extrapolated
        (``_EVERY_S``)."""
        now_s = self._clock()
        if now_s - self._read_s >= self._counter.every_s:
            self._read(now_s)
        grown_j = self._counted_j + self._power_w * (now_s - self._read_s) - self._told_j
        if grown_j <= 0:  # the last extrapolation was too high: return 0 J until the counter catches up
            return 0.0
        self._told_j += grown_j
        return grown_j * self._share

    def _read(self, now_s: float) -> None:
        self._power_w = 0.0
        try:
            now_j = self._counter.joules()
        except OSError as error:
            self._warn(f"cannot be read: {error}")
            return
        passed_s, self._read_s = now_s - self._read_s, now_s
        grown_j, self._last_j = now_j - self._last_j, now_j
        # an impossible change: the counter was reset. 1 s is added because counters are updated in jumps
        if not 0 <= grown_j <= _MOST_W * (passed_s + 1.0):
            self._warn(f"moved by {grown_j:,.0f} J in {passed_s:.1f} s, which is skipped")
            return
        self._counted_j += grown_j
        if self._counter.every_s:
            self._power_w = grown_j / passed_s

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            _log.warning("the counter of joules (%s) %s", self._counter.name, what)
        self._has_warned = True


def energy_meter(world: World) -> EnergyMeter:
    """Return this rank's energy meter with the best counter that can be read; all ranks call it together."""
    gpu = gpu_of(world.device)
    counter = counter_of(gpu, world.device.type)
    share, source = shared(counter, gathered((counter.name, counter.host)))
    return EnergyMeter(counter, share, source, gpu, tells=world.is_first)


def shared(counter: Counter, everyone: Sequence[tuple[str, str]]) -> tuple[float, str]:
    """Return a rank's share of the energy that its ``counter`` counts, and a text that names the sources of all ranks.

    Args:
        counter: the rank's counter.
        everyone: name and host of every rank's counter, this rank's included.

    Examples:
        >>> mine = Counter("rapl", lambda: 0.0, host="a")
        >>> shared(mine, [("rapl", "a"), ("rapl", "a"), ("nvml", "")])
        (0.5, 'mixed: nvml; rapl')
    """
    share = 1.0 / sum(host == counter.host for _, host in everyone) if counter.host else 1.0
    names = sorted({name for name, _ in everyone})
    return share, names[0] if len(names) == 1 else f"mixed: {'; '.join(names)}"
