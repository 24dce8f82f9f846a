"""What a worker's process imports first. Light itself, so that it can switch the garbage collector off before."""

from __future__ import annotations

import gc
import importlib

_OF_WORKERS = ("ray.train.torch", "springtide.ray.train.worker")
"""What forms a group needs the first, too: all ranks would wait for a new one."""


def load_worker() -> None:
    """Import what a worker's process needs, without garbage collections, which would take a quarter of the time. What is loaded
    is looked at by no later one: it would take half of a restart's time."""
    gc.disable()
    for name in _OF_WORKERS:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
