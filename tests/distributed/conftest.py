"""Real gloo processes for numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import run_ranks

from springtide.config import Config


@pytest.fixture
def tiny(tiny: Config) -> Config:
    """The tiny recipe, whose ranks write checkpoints themselves. By default each starts a process that writes them, which takes
    longer than most of these tests; the tests about that set ``checkpoint.stage`` to a folder again."""
    return tiny.override({"checkpoint.stage": ""})


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, function, *arguments)``: what ``function(world, *arguments)`` returns on each rank."""
    return run_ranks
