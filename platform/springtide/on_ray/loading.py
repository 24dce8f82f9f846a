"""Import torch, Ray Train and the rest without garbage collections: these would take a quarter of the time, and find next to
nothing. Light itself: a process calls it before it imports what is heavy."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator

_OF_WORKERS = ("ray.train.torch", "springtide.on_ray.train.worker")
"""What forms a group needs the first, too: all ranks would wait for a new one."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Switch the garbage collector off in the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_worker() -> None:
    """Import what a worker's process needs, which is looked at by no later collection: it would take half of a restart's
    time."""
    with without_collections():
        for name in _OF_WORKERS:
            importlib.import_module(name)
        gc.freeze()
