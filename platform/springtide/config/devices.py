"""Accelerators by name: dense FLOP/s and, for some, size and speed of the memory. The figures are from the makers' data
sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

# From the makers' data sheets: tensor cores, dense matrices, bf16 with sums in fp32 (fp16 if a device has no bf16). If a sheet
# only has figures for sparse matrices, this table has half of them.
# nvidia.com/data-center/{h100,h200,a100,l4,l40,l40s,v100,tesla-t4}, the Blackwell data sheet (a GPU's share of an HGX or
# NVL72), the GA102 and Ada white papers (A10, A40, A6000, RTX), amd.com/instinct; A10G, H20, H800, A800 and GH200 are from
# their sellers. An entry matches a device name that contains all words of the entry. The first match applies, so special cases
# come first.
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
    ("MI250X", 191.5e12, _BF16),  # for one of its two dies, because software sees each die as a device
)
_OTHER_DEVICES = {"MIG", "LAPTOP", "D", "TI", "SUPER"}
"""Words that mark a different device than the one in ``_DENSE``: an ``RTX 4090 Laptop`` is slower than an ``RTX 4090``. A
device name with one of these words gets no figures."""
_MEMORY: dict[str, tuple[float, float]] = {
    "B200": (180e9, 8e12),
    "H200 NVL": (141e9, 4.8e12),
    "H200": (141e9, 4.8e12),
    "H100 NVL": (94e9, 3.9e12),
    "H100 PCIE": (80e9, 2.0e12),
    "H100": (80e9, 3.35e12),
    "H20": (96e9, 4.0e12),
    "A100 40GB": (40e9, 1.555e12),
    "A100 80GB": (80e9, 2.039e12),
    "A40": (48e9, 696e9),
    "A30": (24e9, 933e9),
    "A10": (24e9, 600e9),
    "A10G": (24e9, 600e9),
    "A6000": (48e9, 768e9),
    "L40S": (48e9, 864e9),
    "L40": (48e9, 864e9),
    "L4": (24e9, 300e9),
    "RTX 4090": (24e9, 1.008e12),
    "V100 16GB": (16e9, 900e9),
    "V100 32GB": (32e9, 900e9),
    "T4": (16e9, 320e9),
    "MI355X": (288e9, 8e12),
    "MI325X": (256e9, 6e12),
    "MI300X": (192e9, 5.3e12),
}
"""Device name -> (memory size [bytes], memory speed [bytes/s]). Names are as in ``_DENSE``. If a device is sold with two memory
sizes, the name ends with the size: ``A100 40GB``."""


class DeviceFigures(NamedTuple):
    """Figures from a device's data sheet."""

    memory: float
    """Device memory [bytes]."""
    flops: float
    """Dense bf16 FLOP/s [FLOP/s]."""
    bandwidth: float
    """Speed of the device memory [bytes/s]."""


def data_sheet(name: str) -> tuple[float, str] | None:
    """Return the dense FLOP/s of the device called ``name`` and the source of the figure; None if the device is unknown."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _OTHER_DEVICES:
        return None
    for known, flops, kind in _DENSE:
        if words.issuperset(known.split()):
            return flops, f"{name}'s data sheet, dense {kind}"
    return None


def known_devices() -> list[str]:
    """Return the devices whose FLOP/s, memory size and memory speed are known. A cluster file may give only their names."""
    return list(_MEMORY)


def figures_of(name: str) -> DeviceFigures | None:
    """Return the figures of a device, given one of the names in ``known_devices``; None for another name.

    >>> figures_of("h100")
    DeviceFigures(memory=80000000000.0, flops=989000000000000.0, bandwidth=3350000000000.0)
    """
    known, found = _MEMORY.get(name.upper()), data_sheet(name)
    return DeviceFigures(known[0], found[0], known[1]) if known and found else None
