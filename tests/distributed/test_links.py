"""A rank whose links are cut waits for nobody, and may join another group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from links import cut_off

pytestmark = pytest.mark.distributed


def test_a_collective_that_waits_for_a_rank_that_never_comes_fails_when_it_is_cut(
    tmp_path: Path, ranks: Callable[..., list[Any]]
) -> None:
    *waited, (links, opened, raised, total) = ranks(5, cut_off, str(tmp_path))
    assert opened == links >= 4
    assert raised == ""
    for count, opened, raised, total in waited:
        assert opened == count >= 4
        assert "Connection" in raised or "closed" in raised
        assert total == 5.0
