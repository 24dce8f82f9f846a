"""Requests to the store as S3 would see them, bytes, processor time and memory of a call, for benchmarks/scale.py."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from springtide.storage import Folder

PAGE = 1000
"""Names in a page of a listing, and files in one request to remove some."""


class Cost(NamedTuple):
    """What something costs at one size."""

    calls: int
    """Requests to the store, and calls to other processes, of all processes together where it says so."""
    bytes: int
    """Sent and received by the busiest process."""
    cpu_s: float
    """Processor time of the busiest process."""
    peak_bytes: int
    """Most memory that it allocated meanwhile, as Python's allocator and numpy count it."""


class Calls:
    """A count of the calls to other processes, each of which returns at once what it is given."""

    def __init__(self, told: int = 0) -> None:
        """``told``: bytes that all of them move together."""
        self._number, self._told = 0, told

    def __call__(self, answer: Any = None) -> Any:
        self._number += 1
        return answer

    def spent(self) -> tuple[int, int]:
        """Return the calls since the last time, and their bytes."""
        before, self._number = self._number, 0
        return before, self._told


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count requests and bytes of all folders in the block."""
    asked, lock, here = Counter[str](), threading.Lock(), threading.local()

    def of(name: str, cost: Callable[..., tuple[int, int]]) -> Any:
        before = getattr(Folder, name)

        def call(folder: Folder, *rest: Any, **named: Any) -> Any:
            is_inner, here.is_inner = getattr(here, "is_inner", False), True
            calls, size = 1, 0
            try:
                found = before(folder, *rest, **named)
                calls, size = cost(found, *rest)
            finally:  # also where there is no such file
                here.is_inner = is_inner
                if not is_inner:  # what one method asks through another is one request
                    with lock:
                        asked["calls"] += calls
                        asked["bytes"] += size
            return found

        return mock.patch.object(Folder, name, call)

    def listing(found: Sequence[str], *_: Any) -> tuple[int, int]:
        return max(1, -(-len(found) // PAGE)), sum(map(len, found))

    costs: dict[str, Callable[..., tuple[int, int]]] = {
        "read": lambda found, *_: (1, len(found)),
        "read_range": lambda found, *_: (1, len(found)),
        "stream": lambda _, name, begin, end: (1, end - begin),
        "names": listing,
        "files": listing,
        "exists": lambda *_: (1, 0),
        "create": lambda _, name, data, *rest: (1, len(data)),
        "put_stream": lambda _, name, parts, size, *rest: (1, size),
        "remove": lambda *_: (3, 0),  # as s3fs does it: a listing, a look, the removal
        "remove_files": lambda _, names: (-(-len(names) // PAGE), 0),
    }
    with contextlib.ExitStack() as stack:
        for name, cost in costs.items():
            stack.enter_context(of(name, cost))
        yield asked


def cost_of(
    function: Callable[[], Any],
    rounds: int,
    others: Callable[[], tuple[int, int]] = lambda: (0, 0),
    prepare: Callable[[], Any] = lambda: None,
) -> Cost:
    """The cost of ``function``: calls and bytes of its first call, the median processor time, and the peak memory of a last
    call.

    Args:
        function: what is measured; it can be called again after ``prepare``, which is not measured.
        rounds: calls that are timed.
        others: calls and bytes that are not of a store, since it was last asked.
        prepare: called before each call.
    """
    prepare()
    others()
    with counted() as asked:
        function()
    more = others()
    times = []
    for _ in range(rounds):
        prepare()
        gc.collect()
        begin_s = time.process_time()
        function()
        times.append(time.process_time() - begin_s)
    prepare()
    gc.collect()
    tracemalloc.start()
    try:
        function()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return Cost(asked["calls"] + more[0], asked["bytes"] + more[1], sorted(times)[len(times) // 2], peak)
