"""One GPU as NVML tells of it, through nvidia-ml-py, which is optional: without it, nothing is known."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from springtide.config.steps import StepsDone
from springtide.events import Monitored


class Gpu:
    """A GPU that NVML knows."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """``nvml``: the module ``pynvml``, initialised; ``uuid``: as ``GPU-...``. Raises OSError if NVML does not know it."""
        self._nvml = nvml
        self._handle = self._ask("DeviceGetHandleByUUID", uuid)

    def joules(self) -> float:
        """Return what the GPU has used since its driver was loaded [J]. Raises OSError if the card does not count it."""
        return float(self._ask("DeviceGetTotalEnergyConsumption", self._handle)) / 1e3  # it counts millijoules

    def figures(self, step: StepsDone) -> Monitored:
        """Return the GPU's state now, after ``step`` steps; a figure that NVML does not tell is None."""
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
        )

    def _told(self, name: str, *arguments: Any) -> Any:
        try:
            return self._ask(name, self._handle, *arguments)
        except OSError:
            return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, f"nvml{name}")(*arguments)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {name}: {error}") from error


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU behind ``device``; None if it is none, or NVML cannot be asked about it, as about a MIG slice."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")  # optional
    except ImportError:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        nvml.nvmlInit()
        return Gpu(nvml, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except (nvml.NVMLError, OSError):
        return None
