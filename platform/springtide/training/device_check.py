"""Check of a device before it joins a worker group, and search for stragglers while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from springtide.config.steps import StepsDone
from springtide.dist import World
from springtide.elastic.health import Health, slow
from springtide.events import Straggling
from springtide.training.hooks import StepContext, StepHook
from springtide.training.peak_flops import wait_for
from springtide.training.step import StepSignals

_SIZES = {"cpu": 768, "cuda": 4096}
_COPY_BYTES = 64 * 2**20
_ROUNDS = 5


def check_device(device: torch.device) -> Health:
    """Measure how fast the device multiplies and copies, and check that the results are right. On a CPU only this thread's
    time counts: other users of the machine do not matter."""
    small, a = _matrix(device)
    multiply_s, product = _best_s(device, lambda: a @ a.T)
    # integers far below 2**24: sums are exact in any order
    wrong = "" if bool((product == (small * small).sum()).all()) else "multiplies wrong"
    pattern = torch.arange(_COPY_BYTES // 8, dtype=torch.int64, device=device)
    copy_s, copy = _best_s(device, pattern.clone)
    if not torch.equal(copy, pattern):
        wrong = "copies wrong"
    return Health(_flops(a) / multiply_s, 2 * _COPY_BYTES / copy_s, wrong)


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
    """Measure the FLOP/s that the device gives this process now, all disturbances included."""
    _, a = _matrix(device)
    a @ a.T
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        a @ a.T
    wait_for(device)
    return _ROUNDS * _flops(a) / (time.perf_counter() - begin)


def _matrix(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a row of small integers, and a square matrix of such rows."""
    size = _SIZES[device.type]
    row = torch.arange(size, dtype=torch.float32, device=device) % 8
    return row, row.repeat(size, 1)


def _flops(a: Tensor) -> float:
    """Return the FLOPs of a @ a.T."""
    return 2.0 * len(a) ** 3


class StragglerDetector(StepHook):
    """Detector of ranks whose devices hold up the others: all ranks measure their device after the same step, and the
    results travel in the next step's all-reduce."""

    def __init__(self, world: World, nodes: Sequence[str], every_s: float) -> None:
        """``nodes``: the node of each rank, if known; ``every_s``: time between measurements [s], 0 never measures."""
        self._world, self._nodes, self._every_s = world, nodes, every_s
        self._next_s = time.monotonic() + every_s
        self._slow_before: set[int] = set()
        self._told: set[int] = set()
        self.speed = 0.0
        """What this rank has measured since the last step [FLOP/s]; 0 if it has not."""

    def signals(self, signals: StepSignals, step: StepsDone) -> StepSignals:
        """Add this rank's measurement, and on rank 0 whether devices are to be measured after this step."""
        due = self._world.is_first and self._world.size > 1 and bool(self._every_s) and time.monotonic() >= self._next_s
        if due:
            self._next_s = time.monotonic() + self._every_s
        return signals._replace(examine=due, speed=self.speed)

    def between_steps(self, done: StepContext) -> Iterator[Straggling]:
        """Report each rank once that was far slower twice in a row; measure this device if it is time."""
        speeds = done.result.speeds
        if all(speeds):
            found = slow(speeds)
            for rank in sorted(found.keys() & self._slow_before - self._told):
                node = self._nodes[rank] if self._nodes else ""
                yield Straggling(step=done.step, rank=rank, node=node, share=round(found[rank], 3))
                self._told.add(rank)
            self._slow_before = set(found)
        self.speed = speed(self._world.device) if done.result.examine else 0.0
