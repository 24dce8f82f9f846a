"""The peak FLOP/s of a device, the denominator of MFU, and where the figure came from."""

from __future__ import annotations

import functools
import re
import time

import torch

# The makers' data sheets: tensor cores, dense matrices, bf16 with sums in fp32 (fp16 where a device has no bf16);
# where only sparse figures are given, half of them. nvidia.com/data-center/{h100,h200,a100,l4,l40,l40s,v100,tesla-t4}, the
# Blackwell data sheet (a GPU's share of an HGX or NVL72), the GA102 and Ada white papers (A10, A40, A6000, RTX),
# amd.com/instinct; A10G, H20, H800, A800 and GH200 are from their sellers. An entry matches a name that has all its words;
# special cases come first.
_BF16 = "bf16"
_FP16 = "fp16"
_DENSE: tuple[tuple[str, float, str], ...] = (
    ("GB300", 2500e12, _BF16),
    ("B300", 2250e12, _BF16),
    ("GB200", 2500e12, _BF16),
    ("B200", 2250e12, _BF16),
    ("B100", 1750e12, _BF16),
    ("GH200", 989e12, _BF16),
    ("H200 NVL", 836e12, _BF16),
    ("H200", 989e12, _BF16),
    ("H100 NVL", 835e12, _BF16),
    ("H100 PCIE", 756e12, _BF16),
    ("H100", 989e12, _BF16),
    ("H800 PCIE", 756e12, _BF16),
    ("H800", 989e12, _BF16),
    ("H20", 148e12, _BF16),
    ("A100", 312e12, _BF16),
    ("A800", 312e12, _BF16),
    ("A40", 149.7e12, _BF16),
    ("A30", 165e12, _BF16),
    ("A10", 125e12, _BF16),
    ("A10G", 70e12, _BF16),
    ("A6000", 154.8e12, _BF16),
    ("L40S", 362e12, _BF16),
    ("L40", 181e12, _BF16),
    ("L4", 121e12, _BF16),
    ("RTX 6000 ADA", 364.2e12, _BF16),
    ("RTX 5090", 209.5e12, _BF16),
    ("RTX 4090", 165.2e12, _BF16),
    ("RTX 3090", 71e12, _BF16),
    ("V100 PCIE", 112e12, _FP16),
    ("V100", 125e12, _FP16),
    ("T4", 65e12, _FP16),
    ("MI355X", 2516.6e12, _BF16),
    ("MI325X", 1307.4e12, _BF16),
    ("MI300X", 1307.4e12, _BF16),
    ("MI300A", 980.6e12, _BF16),
    ("MI250X", 191.5e12, _BF16),  # each of its two dies is a device
)
_OTHER_DEVICES = {"MIG", "LAPTOP", "D", "TI", "SUPER"}
"""A name with one of these words is another device, mostly a smaller one."""
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


def data_sheet(name: str) -> tuple[float, str] | None:
    """Return the dense FLOP/s of the device called ``name``, and their source; None if it is unknown."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _OTHER_DEVICES:
        return None
    for known, flops, kind in _DENSE:
        if words.issuperset(known.split()):
            return flops, f"{name}'s data sheet, dense {kind}"
    return None


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
