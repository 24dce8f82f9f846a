"""Seeds of random numbers in training. Every generator is seeded anew in each step, as a function of step and lane (a fixed
share of every batch)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from springtide.config.steps import StepsDone
from springtide.storage.digest import of_bytes


def seed_of(seed: int, step: StepsDone, lane: int) -> int:
    """Return the 64-bit seed of the generators for ``lane``, a fixed share of every batch, in one step. ``step``: number of
    steps done before this step. ``seed``: ``train.seed``."""
    return int(of_bytes(f"{seed} {step} {lane}".encode())[:16], 16)


def lane_seeds(seed: int, step: StepsDone, lanes: range, lane_rows: Sequence[int], by_lane: bool) -> dict[int, int]:
    """Return the seeds of a rank's lanes (fixed shares of every batch) in a step: index of a lane's first row among the rank's
    rows -> seed.

    The rank seeds its generators when a micro-batch begins with such a row. So checkpoints contain no generator state, and a
    resumed run draws the same numbers as an uninterrupted one.

    Args:
        seed: ``train.seed``.
        step: steps done before this one.
        lanes: the lanes of the rank.
        lane_rows: number of rows in each of these lanes.
        by_lane: whether no micro-batch holds rows of two lanes. If so, each lane gets a seed, and random numbers do not depend
            on the world size. Otherwise only the first lane with rows gets a seed.
    """
    found, begin = dict[int, int](), 0
    for lane, rows in zip(lanes, lane_rows, strict=True):
        if rows and (by_lane or not found):
            found[begin] = seed_of(seed, step, lane)
        begin += rows
    return found


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy, from which a model or user code may draw. ``seed``: 64 bits, as from
    ``seed_of``."""
    torch.manual_seed(seed)  # seeds the generators of every device
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the state of all generators after the body of the ``with`` statement, which may seed and use them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
