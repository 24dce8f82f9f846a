"""Random numbers in training: every generator is seeded at each step, as a function of the step and the rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from springtide.config.steps import StepsDone
from springtide.store.digest import of_bytes


def seed_generators(seed: int, step: StepsDone, rank: int) -> None:
    """Seed every generator that a model or a user's code may draw from, as a function of the step. So checkpoints hold no
    generator state, and an interrupted run draws the same numbers as an uninterrupted one, at the same world size."""
    mixed = int(of_bytes(f"{seed} {step} {rank}".encode())[:16], 16)
    torch.manual_seed(mixed)  # on every device
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


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
