"""Copies of a text model in processes of this machine, which share the batches of an evaluation."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from springtide.errors import ConfigError, explain
from springtide.generation.text_model import TextModel

MapBatches = Callable[[str, Sequence[tuple[Any, ...]]], Iterator[Any]]
"""Calls a method of a text model with the arguments of each batch, and yields the results in order."""

_model: TextModel | None = None
"""The copy that this process holds."""


@contextlib.contextmanager
def model_pool(open_model: Callable[[], TextModel], processes: int) -> Iterator[MapBatches]:
    """Yield a function that shares batches among ``processes`` processes. Each loads a copy and computes with its share of this
    machine's CPUs, so a batch has the same result in any of them. ConfigError if a process ends, perhaps for want of memory.

    Args:
        open_model: loads the model; it is pickled.
        processes: number of copies.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    start = functools.partial(_open, open_model, threads)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start) as pool:

        def map_batches(method: str, batches: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
            try:
                yield from pool.map(functools.partial(_compute, method), batches)
            except BrokenProcessPool as error:
                problem = f"a process ended before its batch was computed ({error})"
                raise ConfigError(
                    explain("processes", processes, problem, "free memory, or use fewer: each has a copy of the model")
                ) from None

        yield map_batches


def _open(open_model: Callable[[], TextModel], threads: int) -> None:
    global _model
    torch.set_num_threads(threads)
    _model = open_model()


def _compute(method: str, batch: tuple[Any, ...]) -> Any:
    return getattr(_model, method)(*batch)
