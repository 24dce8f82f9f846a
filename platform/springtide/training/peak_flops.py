"""The peak FLOP/s of a device, the denominator of MFU, and where the figure came from."""

from __future__ import annotations

import functools
import time

import torch

from springtide.config.devices import data_sheet

_SIZES = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 10


@functools.cache  # a process keeps its device from one worker group to the next
def peak_flops(device: torch.device) -> tuple[float, str]:
    """Return the FLOP/s of one device, and where the figure is from: a data sheet, or a matmul that is timed now."""
    if device.type == "cuda" and (known := data_sheet(torch.cuda.get_device_name(device))):
        return known
    dtype = torch.float32
    if device.type == "cuda":  # before Ampere, tensor cores take only fp16
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    size, kind = _SIZES[device.type], str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    name = f"unknown {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    source = f"{kind} matmul of {size}x{size} measured on this {name} at start, best of {_ROUNDS}"
    return _measure(device, dtype, size), source


def _measure(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    a @ a
    for _ in range(_ROUNDS):
        wait_for(device)
        begin = time.perf_counter()
        a @ a
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
