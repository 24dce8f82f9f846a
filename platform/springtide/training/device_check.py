"""Check of a device before it joins a worker group, and detection of stragglers during training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from springtide.checkpoint.restore import Restored
from springtide.distributed import World
from springtide.elastic.health import SLOW_SHARE, Health, slow
from springtide.events import Straggling
from springtide.training.device import wait_for
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share

_SIZES = {"cpu": 768, "cuda": 4096}
_COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Number of bytes that the test copies: many times the last-level cache (50 MB of L2 on an H100), so that the copy measures
memory bandwidth."""
_ROUNDS = 5
_PERIOD = 16
"""Period of the signs in the test product: of 16 successive summands 8 are positive and 8 negative, and they cancel
(``matrices``)."""
_RESULTS = 5
_MEASURE, _SPEED = "measure devices", "device speed"
_SLOW_SHARE = {"cpu": SLOW_SHARE, "cuda": 0.9}
"""Device type -> share of the other ranks' median speed below which a rank is slow. The GPU limit is tighter: a throttling GPU
loses 10 to 25%, and a GPU, unlike CPUs, is not shared with other programs."""


def check_device(device: torch.device) -> Health:
    """Measure how fast the device multiplies and copies, and check that the results are right. On a CPU, the CPU time of this
    thread is measured, so that other programs do not affect the result. On a GPU, the product uses the tensor cores."""
    a, b = matrices(_SIZES[device.type], _dtype(device), device)
    multiply_s, product = _best_s(device, lambda: a @ b)
    wrong = "" if is_right(product) else "multiplies wrong"
    copy_bytes = _COPY_BYTES[device.type]
    pattern = torch.arange(copy_bytes // 8, dtype=torch.int64, device=device)
    copy_s, copy = _best_s(device, pattern.clone)
    if not torch.equal(copy, pattern):
        wrong = "copies wrong"
    return Health(_flops(a) / multiply_s, 2 * copy_bytes / copy_s, wrong)


def matrices(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two square matrices of small integers whose product is exact for any order or blocking of the sums, in bf16 too.

    In each element of the product, 16 successive summands cancel. Only the first row of ``b`` adds a small number, 0 to 4.

    Args:
        size: number of rows and of columns, a multiple of 16.
        dtype: bf16, fp16 or fp32.
        device: the device that holds them.
    """
    place = torch.arange(size, device=device)
    sign = 1 - 2 * (place % _PERIOD // (_PERIOD // 2))
    a = (place % (_PERIOD // 2) + 1).repeat(size, 1)
    b = sign[:, None].repeat(1, size)
    b[0] += place % _RESULTS
    return a.to(dtype), b.to(dtype)


def is_right(product: Tensor) -> bool:
    """Return whether ``product`` is the exact product of the two matrices that ``matrices`` returns."""
    place = torch.arange(product.shape[1], device=product.device)
    return bool((product == (place % _RESULTS).to(product.dtype)).all())


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    # tensor cores before Ampere support fp16, but not bf16
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _best_s(device: torch.device, function: object) -> tuple[float, Tensor]:
    assert callable(function)
    best, found = float("inf"), function()
    for _ in range(_ROUNDS):
        wait_for(device)
        begin = _clock(device)
        found = function()
        wait_for(device)
        best = min(best, _clock(device) - begin)
    return max(best, 1e-9), found


def _clock(device: torch.device) -> float:
    return time.perf_counter() if device.type == "cuda" else time.thread_time()


def speed(device: torch.device) -> float:
    """Measure the FLOP/s that this process gets from the device now, in wall-clock time: other programs on the device lower
    it."""
    a, b = matrices(_SIZES[device.type], _dtype(device), device)
    a @ b
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        a @ b
    wait_for(device)
    return _ROUNDS * _flops(a) / (time.perf_counter() - begin)


def _flops(a: Tensor) -> float:
    """Return the FLOPs of a product of two square matrices of the size of ``a``."""
    return 2.0 * len(a) ** 3


class StragglerDetector(Part):
    """Detects stragglers: ranks whose devices are so slow that the other ranks wait for them. All ranks measure their devices
    after the same step, and the results travel in the next step's all-reduce."""

    def __init__(self, world: World, nodes: Sequence[str], every_s: float) -> None:
        """``nodes``: the node of each rank; empty if unknown. ``every_s``: time between measurements [s]; 0 never measures."""
        self._world, self._nodes, self._every_s = world, nodes, every_s
        self.begin(None)  # creates the attributes. Each restore calls ``begin`` again to reset them

    def begin(self, found: Restored | None) -> None:
        self._next_s = time.monotonic() + self._every_s
        self._slow_before: set[int] = set()
        self._told: set[int] = set()
        self.speed = 0.0
        """Speed that this rank has measured since the last step [FLOP/s]; 0 if it has not measured."""

    def contribute(self, message: StepMessage, share: Share) -> None:
        """Add this rank's measured speed to the step's message. On rank 0, add whether all ranks measure after this step."""
        due = self._world.is_first and self._world.size > 1 and bool(self._every_s) and time.monotonic() >= self._next_s
        if due:
            self._next_s = time.monotonic() + self._every_s
        message.any(_MEASURE, due)
        message.by_rank(_SPEED, self.speed)

    def between_steps(self, done: DoneStep) -> Iterator[Straggling]:
        """Report a rank if its device was far slower than others in two measurements in a row. Each rank is reported only once.
        Measure this rank's device if a measurement is due."""
        speeds = done.result.agreed[_SPEED]
        if all(speeds):
            found = slow(speeds, _SLOW_SHARE[self._world.device.type])
            for rank in sorted(found.keys() & self._slow_before - self._told):
                node = self._nodes[rank] if self._nodes else ""
                yield Straggling(step=done.step, rank=rank, node=node, share=round(found[rank], 3))
                self._told.add(rank)
            self._slow_before = set(found)
        self.speed = speed(self._world.device) if done.result.agreed[_MEASURE] else 0.0
