"""The first imports of a worker's process. This module itself imports almost nothing, so that it can switch off the garbage
collector before the large imports."""

from __future__ import annotations

import gc
import importlib

_OF_WORKERS = ("ray.train.torch", "springtide.ray.train.worker")
"""Modules to import. Ray Train needs the first one to form a group; all ranks would wait for a process that must still import
it."""


def load_worker() -> None:
    """Import what a worker's process needs, with the garbage collector off: collections would take a quarter of the import
    time. The loaded objects are frozen (``gc.freeze``), so that later collections skip them. To scan them would take half of
    the time of a restart."""
    gc.disable()
    for name in _OF_WORKERS:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
