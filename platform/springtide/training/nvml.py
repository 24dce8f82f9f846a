"""State, energy and errors of a GPU from NVML, through nvidia-ml-py. The package is optional: without it ``gpu_of`` returns
None."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from springtide.config.steps import StepsDone
from springtide.events import Monitored

_MOST_XIDS = 32
_RECOVERY = {
    1: "a reset",
    2: "a reboot of its host",
    3: "its peers' links drained",
    4: "a drain and a reset",
    5: "a reset of its bus",
}
"""NVML's recovery action (NVML_GPU_RECOVERY_ACTION_...) -> what the GPU needs before it can compute again."""
_THROTTLED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bit of NVML's clock event reasons -> name of the reason. These reasons mean an unwanted loss of speed. A power cap is left
out, because it is usual under load."""


class Gpu:
    """A GPU on which NVML can report: its state, energy and errors."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """``nvml``: the initialised module ``pynvml``. ``uuid``: such as ``GPU-...``. Raises OSError if NVML does not find the
        GPU."""
        self._nvml = nvml
        self._handle = self._ask("DeviceGetHandleByUUID", uuid)
        self._xids: Any = None

    def joules(self) -> float:
        """Return the energy that the GPU has used since its driver was loaded [J]. Raises OSError if the card has no energy
        counter."""
        return float(self._ask("DeviceGetTotalEnergyConsumption", self._handle)) / 1e3  # NVML returns millijoules

    def figures(self, step: StepsDone) -> Monitored:
        """Return the GPU's state now, after ``step`` steps. A figure that NVML does not report is None."""
        nvml = self._nvml
        utilisation, memory = self._told("DeviceGetUtilizationRates"), self._told("DeviceGetMemoryInfo")
        milliwatts = self._told("DeviceGetPowerUsage")
        return Monitored(
            step=step,
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=self._told("DeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._told("DeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            xids=self.xids(),
        )

    def fault(self) -> str:
        """Return why the GPU must not train, as a text to put after "its device"; empty if NVML reports no reason."""
        if (action := self._field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")) in _RECOVERY:
            return f"needs {_RECOVERY[action]}, its driver says"
        rows = self._told("DeviceGetRemappedRows")
        if rows and rows[3]:
            return "has rows of memory that could not be remapped: replace it"
        return ""

    def remarks(self) -> list[str]:
        """Return warnings about a GPU that may train: throttled clocks, or memory rows that a reset would remap."""
        found = []
        reasons = int(self._told("DeviceGetCurrentClocksEventReasons") or 0)
        if why := [text for bit, text in _THROTTLED.items() if reasons & bit]:
            found.append(f"its clocks are lowered by {', '.join(why)}: look at cooling and power")
        rows = self._told("DeviceGetRemappedRows")
        if rows and rows[2]:
            found.append(
                "rows of its memory wait to be remapped: reset it when nothing trains (nvidia-smi --gpu-reset)"
            )
        return found

    def watch_xids(self) -> None:
        """Start to record the GPU's critical errors (XID). Does nothing if NVML has no events for this GPU."""
        events = self._told_all("EventSetCreate")
        if events is not None:
            with contextlib.suppress(OSError, AttributeError):
                self._ask("DeviceRegisterEvents", self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
                self._xids = events

    def xids(self) -> list[int]:
        """Return the critical errors (XID) since the last call; none before ``watch_xids``."""
        found: list[int] = []
        while self._xids is not None and len(found) < _MOST_XIDS:
            event = self._told_all("EventSetWait", self._xids, 0)
            if event is None:  # time-out: no more events
                break
            found.append(int(event.eventData))
        return found

    def _field(self, name: str) -> int | None:
        """Return the value of an unsigned NVML field; None if this NVML or this card does not have it."""
        field = getattr(self._nvml, name, None)
        values = self._told("DeviceGetFieldValues", [field]) if field is not None else None
        return int(values[0].value.uiVal) if values is not None and not values[0].nvmlReturn else None

    def _told(self, name: str, *arguments: Any) -> Any:
        return self._told_all(name, self._handle, *arguments)

    def _told_all(self, name: str, *arguments: Any) -> Any:
        try:
            return self._ask(name, *arguments)
        except OSError:
            return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, f"nvml{name}")(*arguments)
        except (self._nvml.NVMLError, AttributeError) as error:  # an older nvidia-ml-py lacks some functions
            raise OSError(f"NVML: {name}: {error}") from error


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU behind ``device``. None if it is not a GPU, or NVML cannot report on it, such as on a MIG slice."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")  # nvidia-ml-py is optional
    except ImportError:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        nvml.nvmlInit()
        return Gpu(nvml, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except (nvml.NVMLError, OSError):
        return None
