"""The straggler detector reports a rank that is slow in two measurements in a row, and reports it once."""

from __future__ import annotations

import pytest
import torch
from stepping import done_step, result_of

from springtide.distributed import World
from springtide.events import Straggling
from springtide.training.device_check import StragglerDetector
from springtide.training.part import DoneStep


def measured(step: int, *speeds: float) -> DoneStep:
    return done_step(step, result_of({"measure devices": False, "device speed": speeds}))


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
