"""What must not reach a simulated schedule: real time, threads, processes, sockets, folders, random numbers.

``replaced`` puts the simulation's own in their place; ``guarded`` raises ``Leak`` where springtide reaches a real one all the
same, and ``watched`` looks at each built-in function that springtide calls, which is slow.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from simulation.clock import BEGIN_S, Clock, Condition, Event, Lock, Thread

_EVENTS = (
    *(
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "os.exec",
        "_thread.start_new_thread",
    ),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "os.listdir", "os.scandir"),
)
"""Audit events of what a schedule has none of."""
_NANOSECONDS = 1_000_000_000


class Leak(BaseException):
    """Springtide has reached something real: the seed is not all that the history depends on."""


@contextlib.contextmanager
def replaced(clock: Clock, seed: int) -> Iterator[None]:
    """Let time, random numbers, threads and the names of host and process be those of the simulation."""
    drawn = random.Random(seed)
    make = random.Random.__init__

    def seeded(self: random.Random, x: Any = None) -> None:
        make(self, drawn.getrandbits(64) if x is None else x)

    def thread_time() -> float:
        clock.cpu_s += 0.004
        return clock.cpu_s

    def now() -> float:
        return clock.now

    def wall() -> float:
        return BEGIN_S + clock.now

    def in_ns(of: Callable[[], float]) -> Callable[[], int]:
        return lambda: round(of() * _NANOSECONDS)

    me = clock.current_process
    patches = [
        *(mock.patch.object(time, name, now) for name in ("monotonic", "perf_counter")),
        *(mock.patch.object(time, f"{name}_ns", in_ns(now)) for name in ("monotonic", "perf_counter")),
        *(mock.patch.object(time, name, thread_time) for name in ("thread_time", "process_time")),
        mock.patch.object(time, "time", wall),
        mock.patch.object(time, "time_ns", in_ns(wall)),
        mock.patch.object(time, "sleep", clock.sleep),
        mock.patch.object(os, "urandom", drawn.randbytes),
        mock.patch.object(random, "_urandom", drawn.randbytes),
        mock.patch.object(random.Random, "__init__", seeded),
        mock.patch.object(os, "getpid", lambda: me().pid if me() else 1),
        mock.patch.object(socket, "gethostname", lambda: me().host if me() else "hub"),
        *(
            mock.patch.object(threading, kind.__name__, _made_of(kind, clock))
            for kind in (Lock, Condition, Event, Thread)
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)  # the pauses of the journal and of writers
        for one in patches:
            stack.enter_context(one)
        yield


def _made_of(kind: type, clock: Clock) -> Callable[..., Any]:
    """Return what makes a simulated one for springtide, and a real one for a library: torch imports some of itself late."""
    real = getattr(threading, kind.__name__)

    def made(*positional: Any, **named: Any) -> Any:
        is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("springtide.")
        return kind(clock, *positional, **named) if is_ours else real(*positional, **named)

    return made


@contextlib.contextmanager
def guarded(said: Callable[[str], None]) -> Iterator[None]:
    """Raise ``Leak`` where springtide starts a thread or a process, opens a connection or lists a folder, and say it: what
    raises may be swallowed."""
    global _say
    if not _hooked:
        sys.addaudithook(_on_event)
        _hooked.append(True)
    _say = said
    try:
        yield
    finally:
        _say = None


_say: Callable[[str], None] | None = None
_hooked: list[bool] = []


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _say is not None and event in _EVENTS and (where := _caller(sys._getframe(1))):
        _say(f"{where} reaches the real {event}{arguments[:1]}")
        raise Leak(event)


def _caller(frame: types.FrameType | None) -> str:
    """Return the function of springtide that has led here; empty if none has, or by an import."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("importlib."):
            return ""
        if name.startswith("springtide."):
            return f"{name}.{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_REAL = frozenset(
    (
        *(
            f"{name}{of}"
            for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
            for of in ("", "_ns")
        ),
        *("sleep", "urandom", "getrandom", "getpid", "gethostname", "listdir", "scandir", "now", "utcnow", "today"),
        *("acquire", "start_new_thread", "fork", "fork_exec", "cpu_count", "getloadavg"),
    )
)


@contextlib.contextmanager
def watched(said: Callable[[str], None]) -> Iterator[None]:
    """Say where a frame of springtide calls one of ``_REAL`` itself."""

    def profile(frame: types.FrameType, event: str, called: Any) -> None:
        # a dict's get is not the environment's; the lock is that of logging
        if event != "c_call" or called.__name__ not in _REAL or type(called.__self__).__name__ in ("dict", "RLock"):
            return
        if where := _caller(frame):
            said(f"{where} calls the real {called.__qualname__}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
