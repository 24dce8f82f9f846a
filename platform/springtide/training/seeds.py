"""Random numbers in training: every generator is seeded at each step, as a function of the step and the lane."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from springtide.config.steps import StepsDone
from springtide.storage.digest import of_bytes


def seed_of(seed: int, step: StepsDone, lane: int) -> int:
    """Return the 64-bit seed of the generators for ``lane`` in the step after ``step``. ``seed``: ``train.seed``."""
    return int(of_bytes(f"{seed} {step} {lane}".encode())[:16], 16)


def lane_seeds(seed: int, step: StepsDone, lanes: range, lane_rows: Sequence[int], by_lane: bool) -> dict[int, int]:
    """Return the seeds of a rank's rows in a step: row at which a lane begins -> seed.

    The rank seeds its generators where a micro-batch begins with such a row. So checkpoints hold no generator state, and a
    resumed run draws the numbers of an uninterrupted one. ``by_lane``: no micro-batch holds rows of two lanes, so each lane
    gets its seed, and the numbers do not depend on the world size. Else only the first lane gets one.

    Args:
        seed: ``train.seed``.
        step: steps done before.
        lanes: of the rank.
        lane_rows: rows in each of them.
    """
    found, begin = dict[int, int](), 0
    for lane, rows in zip(lanes, lane_rows, strict=True):
        if rows and (by_lane or not found):
            found[begin] = seed_of(seed, step, lane)
        begin += rows
    return found


def seed_generators(seed: int) -> None:
    """Seed every generator that a model or a user's code may draw from. ``seed``: 64 bits, as from ``seed_of``."""
    torch.manual_seed(seed)  # on every device
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Let the block seed the generators and draw from them, and go on afterwards as if it had not."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
