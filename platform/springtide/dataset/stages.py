"""How the jobs of a stage are run and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the number of jobs done, and the number of jobs in all."""

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Runs a function on every item, in any process and any order, and yields the results."""


def in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Run the function on each item in turn, in this process."""
    return (function(item) for item in items)


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
