"""Run code that Ray means for an actor in a thread of a driver. The only file that uses Ray's process context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import ray
from ray.actor import ActorHandle

from springtide.ray._ray_private import RuntimeContext, replace_runtime_context

_ACTING = threading.local()


class _Context(RuntimeContext):
    """This process's context; in a thread under ``run_as_actor`` it names that actor as the current one."""

    def get_actor_id(self) -> str | None:
        actor = getattr(_ACTING, "actor", None)
        return actor._actor_id.hex() if actor is not None else super().get_actor_id()

    @property
    def current_actor(self) -> ActorHandle:
        actor = getattr(_ACTING, "actor", None)
        return actor if actor is not None else super().current_actor


@contextlib.contextmanager
def run_as_actor(actor: ActorHandle) -> Iterator[None]:
    """Make Ray name ``actor`` as the current actor of this thread, in the block. It must live as long as the block."""
    before = ray.get_runtime_context()
    if not isinstance(before, _Context):
        replace_runtime_context(_Context(before.worker))
    _ACTING.actor = actor
    try:
        yield
    finally:
        _ACTING.actor = None
