"""The result of a micro-batch in a few numbers that ranks can exchange, computed where the gradient is.

    loss | norm | two projections: sums of all elements under random signs | a digest of all bits, as four numbers of 16 bits

Integers commute, so the digest is the same in any order of summation; the projections show how far two results are apart.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from springtide.elastic.agreement import MicroBatchResult

_ODD = (0x5851F42D4C957F2D, -0x61C8864680B583EB, 0x2545F4914F6CDD1D)
"""Multipliers that mix the bits of an element's index: for the digest, and for the signs of each projection."""
_LIMBS = 4
SIZE = 2 + len(_ODD[1:]) + _LIMBS
"""Numbers in a summary."""


def of_gradient(gradient_BLD: Tensor) -> Tensor:
    """Return norm, projections and digest of a gradient, float64 (SIZE - 1,). Nothing waits for the device."""
    squares, digest = torch.zeros((), dtype=torch.float64, device=gradient_BLD.device), 0
    sums = [torch.zeros_like(squares) for _ in _ODD[1:]]
    begin = 0
    for part_LD in gradient_BLD:  # a part at a time: indices take as much memory as eight-byte numbers
        values = part_LD.contiguous().flatten()
        bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
        index = torch.arange(begin, begin + len(values), dtype=torch.int64, device=values.device)
        digest = digest + (bits.long() * ((2 * index + 1) * _ODD[0])).sum()  # odd factors: no change of a bit is lost
        doubles = values.double()
        squares = squares + doubles.square().sum()
        sums = [
            total + torch.where(index * odd < 0, -doubles, doubles).sum()
            for total, odd in zip(sums, _ODD[1:], strict=True)
        ]
        begin += len(values)
    return torch.stack([squares.sqrt(), *sums, *_limbs(torch.as_tensor(digest, device=squares.device))])


def summary(nats: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return the numbers of a ``MicroBatchResult``, float64 (SIZE,). ``gradients``: the result of ``of_gradient``, if any."""
    rest = gradients[0] if gradients else torch.zeros(SIZE - 1, dtype=torch.float64, device=nats.device)
    loss_limbs = torch.stack(_limbs(nats.detach().float().view(torch.int32).long() * _ODD[0]))
    limbs = (rest[-_LIMBS:].long() ^ loss_limbs.long()).double()
    return torch.cat([nats.detach().double().reshape(1), rest[:-_LIMBS], limbs])


def of_summary(values: Sequence[float], device: int) -> MicroBatchResult:
    """Return the result that a summary describes; ``device``: the kind of device that computed it."""
    nats, norm, *rest = values
    digest = sum(int(limb) << (16 * place) for place, limb in enumerate(rest[-_LIMBS:]))
    return MicroBatchResult(nats, norm, tuple(rest[:-_LIMBS]), digest, device)


def _limbs(digest: Tensor) -> list[Tensor]:
    """Return 64 bits as numbers of 16 bits, each exact as float64."""
    return [((digest >> (16 * place)) & 0xFFFF).double() for place in range(_LIMBS)]


def checksum(rows_BL: Tensor) -> float:
    """Return 48 bits over ids and their places, exact as a float64."""
    ids = rows_BL.flatten()
    places = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
    return float(int((ids * (2 * places + 1)).sum()) % 2**48)


@functools.cache
def device_kind(device: torch.device) -> float:
    """Return a number that devices share whose results are the same bit for bit."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = torch.backends.cpu.get_cpu_capability() + _processor()
    return float(zlib.crc32(f"{name} {torch.__version__} {torch.get_num_threads()}".encode()))


def _processor() -> str:
    """Return the processor's name; empty where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("model name")), "")
    return ""
