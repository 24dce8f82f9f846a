"""Defects that were found and mended, to plant back: the fuzzer must find each of them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Planted(NamedTuple):
    """A defect, and the target that finds it."""

    target: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]


DEFECTS: dict[str, Planted] = {}
