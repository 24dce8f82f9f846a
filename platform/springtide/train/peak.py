"""The peak FLOP/s of a device, the denominator of MFU, and where the figure came from."""

from __future__ import annotations

import functools
import time

import torch

_DENSE_BF16 = {
    "H200": (989e12, "NVIDIA H200 data sheet, dense bf16"),
    "H100": (989e12, "NVIDIA H100 SXM data sheet, dense bf16"),
    "A100": (312e12, "NVIDIA A100 data sheet, dense bf16"),
    "L40S": (362e12, "NVIDIA L40S data sheet, dense bf16"),
    "L4": (121e12, "NVIDIA L4 data sheet, dense bf16"),
    "A10G": (70e12, "NVIDIA A10G data sheet, dense bf16"),
    "T4": (65e12, "NVIDIA T4 data sheet, dense fp16"),
    "V100": (125e12, "NVIDIA V100 data sheet, dense fp16"),
}
_SIZE = 1024
_ROUNDS = 10


@functools.cache  # a process keeps its device from one group of workers to the next
def peak_flops(device: torch.device) -> tuple[float, str]:
    """FLOP/s of one device, and its source in words: a data sheet, or a matmul timed here and now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, figure in _DENSE_BF16.items():
            if known in name.replace("-", " ").split() or f" {known}" in name:
                return figure
    return _measure(
        device
    ), f"fp32 matmul of {_SIZE}x{_SIZE} measured on this {device.type} at start, best of {_ROUNDS}"


def _measure(device: torch.device) -> float:
    a = torch.randn(_SIZE, _SIZE, device=device)
    best = float("inf")
    a @ a
    for _ in range(_ROUNDS):
        wait_for(device)
        begin = time.perf_counter()
        a @ a
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * _SIZE**3 / best


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
