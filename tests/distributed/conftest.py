"""Real gloo processes for numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import run_ranks


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, function, *arguments)``: what ``function(world, *arguments)`` returns on each rank."""
    return run_ranks
