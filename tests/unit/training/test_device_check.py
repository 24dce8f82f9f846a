"""The straggler detector reports a rank that is slow in two measurements in a row, and reports it once."""

from __future__ import annotations

import pytest
import torch

from springtide.config.steps import StepsDone
from springtide.dist import World
from springtide.events import Straggling
from springtide.training.device_check import StragglerDetector
from springtide.training.hooks import StepContext
from springtide.training.step import StepResult


def measured(step: int, *speeds: float) -> StepContext:
    result = StepResult(
        loss=1.0,
        grad_norm=1.0,
        tokens=1,
        digest=0,
        interrupts=frozenset(),
        saving=False,
        save_failed=False,
        keeping=False,
        snapshot=False,
        examine=False,
        data_waits_s=(),
        speeds=speeds,
    )
    return StepContext(StepsDone(step), result, learning_rate=0.1, step_time_s=1.0, data_wait_s=0.0)


@pytest.mark.parametrize(
    ("rounds", "named"),
    [
        ([(9, 9, 9), (9, 8, 9), (8, 9, 9)], []),
        ([(9, 1, 9), (9, 9, 9), (9, 1, 9)], []),  # slow, but not twice in a row
        ([(9, 1, 9), (1, 9, 9), (9, 9, 1)], []),
        ([(9, 1, 9), (9, 2, 9), (9, 1, 9)], [(2, 1)]),  # once
        ([(9, 1, 9), (9, 9, 9), (9, 1, 9), (9, 1, 9)], [(4, 1)]),
        ([(9, 1, 9), (0, 0, 0), (9, 1, 9)], [(3, 1)]),  # a step without measurements is no round
    ],
)
def test_a_rank_that_is_slow_twice_in_a_row_is_named_once(
    rounds: list[tuple[float, ...]], named: list[tuple[int, int]]
) -> None:
    detector = StragglerDetector(World(rank=0, size=3, device=torch.device("cpu")), ["a", "b", "c"], every_s=60.0)
    found: list[Straggling] = []
    for step, speeds in enumerate(rounds, 1):
        found += detector.between_steps(measured(step, *speeds))
    assert [(event.step, event.rank) for event in found] == named
    assert all(event.node == "b" and event.share < 0.3 for event in found)


@pytest.mark.parametrize(("device", "named"), [("cpu", []), ("cuda", [1])])
def test_a_gpu_that_throttles_is_slow_earlier_than_a_busy_cpu(device: str, named: list[int]) -> None:
    detector = StragglerDetector(World(rank=0, size=3, device=torch.device(device)), ["a", "b", "c"], every_s=60.0)
    found = [rank.rank for step in (1, 2) for rank in detector.between_steps(measured(step, 9.0, 7.5, 9.0))]
    assert found == named
