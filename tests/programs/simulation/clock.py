"""Time and processes. Exactly one process runs; every wait and every call of the store is a point where others may."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import greenlet

BEGIN_S = 1_700_000_000.0


class Process:
    """What runs on a host until it returns, raises or is killed."""

    def __init__(self, clock: Clock, name: str, host: str, work: Callable[[], Any]) -> None:
        self.clock, self.name, self.host, self.pid = clock, name, host, next(clock.pids)
        self.alive, self.result, self.error = True, None, None
        self.frozen_until_s = 0.0
        self.rank: Any = None
        """The ``Rank`` that it is the process of, in whichever group."""
        self.ended: list[Callable[[], None]] = []
        self._work = work
        self.greenlet = greenlet.greenlet(self._run, parent=clock.hub)

    def _run(self) -> None:
        try:
            self.result = self._work()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # whoever started it looks
            self.error = error
        self.alive = False
        for one in self.ended:
            one()

    def kill(self) -> None:
        """SIGKILL: it never runs again."""
        if self.alive and not self.greenlet.dead:
            self.alive = False
            for one in self.ended:
                one()

    def freeze(self, until_s: float) -> None:
        """SIGSTOP until then, or until an earlier one ends."""
        self.frozen_until_s = max(self.frozen_until_s, until_s)

    def step(self) -> None:
        """Run until the next wait."""
        clock = self.clock
        if not self.alive or clock.over:
            return
        if self.frozen_until_s > clock.now:
            clock.at(self.frozen_until_s, self.step)
            return
        clock.tell(self.name, self.pid)
        before, clock.current = clock.current, self
        self.greenlet.switch()
        clock.current = before


class Clock:
    """Simulated time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.cpu_s = 0.0
        """Processor time of all processes [s]."""
        self.hub = greenlet.getcurrent()
        self.current: Process | None = None
        self.pids = itertools.count(100)
        self.over = False
        self.processes: list[Process] = []
        self.switches = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._history = hashlib.sha256()

    def tell(self, *what: object, data: bytes = b"") -> None:
        """Add to the history: who runs when, what is stored, decided, said."""
        self._history.update(repr((self.now, *what)).encode() + data)

    @property
    def digest(self) -> str:
        """Of the history: the same for the same seed, on every machine."""
        return self._history.hexdigest()[:16]

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Call ``what`` at a time."""
        heapq.heappush(self._queue, (max(when_s, self.now), next(self._numbers), what))

    def after(self, wait_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + wait_s, what)

    def start(self, name: str, host: str, work: Callable[[], Any]) -> Process:
        """Start a process."""
        process = Process(self, name, host, work)
        self.processes.append(process)
        self.after(0.0, process.step)
        return process

    def sleep(self, wait_s: float) -> None:
        """Let the others run; at the end of a simulation, end the process."""
        if self.over:
            raise greenlet.GreenletExit
        if self.current is None or greenlet.getcurrent() is self.hub:
            return  # set-up and checks take no time
        self.after(max(wait_s, 1e-6), self.current.step)
        self.switches += 1
        self.hub.switch()
        if self.over:
            raise greenlet.GreenletExit

    def park(self) -> None:
        """Wait for ``Process.step``."""
        self.hub.switch()
        if self.over:
            raise greenlet.GreenletExit

    def run(self, until_s: float, done: Callable[[], bool]) -> bool:
        """Run to the end; returns whether ``done``, False if nothing can happen any more or time is up."""
        while self._queue and not done():
            when_s, _, what = heapq.heappop(self._queue)
            if when_s > until_s:
                return False
            self.now = when_s
            what()
        return done()

    def end(self) -> None:
        """End what still runs: nothing that it does has an effect."""
        self.over = True
        for process in self.processes:
            if not process.greenlet.dead and process.greenlet:
                with contextlib.suppress(BaseException):
                    process.greenlet.throw(greenlet.GreenletExit)

    def current_process(self) -> Process | None:
        """The one that runs; None in what is set up and checked around them."""
        return self.current if greenlet.getcurrent() is not self.hub else None


class Lock:
    """``threading.Lock``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.held = clock, False

    def acquire(self) -> bool:
        while self.held and self._clock.current_process():
            self._clock.sleep(0.01)
        self.held = True
        return True

    def release(self) -> None:
        self.held = False

    def locked(self) -> bool:
        return self.held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Condition(Lock):
    """``threading.Condition``, with a lock of its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._waiting: list[Process] = []

    def notify_all(self) -> None:
        for process in self._waiting:
            self._clock.after(0.0, process.step)
        self._waiting = []

    def wait(self, timeout: float | None = None) -> None:
        clock = self._clock
        if clock.over:
            raise greenlet.GreenletExit
        process = clock.current
        assert process is not None
        self._waiting.append(process)
        if timeout is not None:
            clock.after(timeout, lambda: self._wake(process))
        self.release()
        try:
            clock.park()
        finally:
            if not clock.over:
                self.acquire()

    def _wake(self, process: Process) -> None:
        if process in self._waiting:
            self._waiting.remove(process)
            process.step()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        clock = self._clock
        if clock.over:
            raise greenlet.GreenletExit
        if clock.current is None:
            return predicate()
        until_s = clock.now + timeout if timeout is not None else float("inf")
        while not predicate():
            left_s = until_s - clock.now
            if left_s <= 0:
                return False
            self.wait(min(left_s, 60.0))
        return True


class Event:
    """``threading.Event``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._is_set = clock, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        until_s = self._clock.now + (timeout if timeout is not None else float("inf"))
        while not self._is_set and self._clock.now < until_s and self._clock.current_process():
            self._clock.sleep(min(until_s - self._clock.now, 0.5))
        return self._is_set


class Thread:
    """``threading.Thread``: a process that ends with the one that started it."""

    def __init__(
        self, clock: Clock, target: Callable[..., Any], name: str = "", daemon: bool = True, args: Any = ()
    ) -> None:
        self._clock, self._target, self._args, self.name = clock, target, args, name
        self.process: Process | None = None

    def start(self) -> None:
        owner = self._clock.current
        host = owner.host if owner else "hub"
        self.process = self._clock.start(self.name, host, lambda: self._target(*self._args))
        if owner:
            owner.ended.append(self.process.kill)

    def is_alive(self) -> bool:
        return self.process is not None and self.process.alive

    def join(self, timeout: float | None = None) -> None:
        while self.is_alive() and not self._clock.over:
            self._clock.sleep(0.05)
