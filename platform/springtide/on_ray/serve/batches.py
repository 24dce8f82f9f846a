"""Requests that wait, and the one batch of them that a thread writes.

    requests that come while a batch is written --the batch ends--> the next batch --thread--> parts --event loop--> clients

Ray's ``serve.batch`` closes a batch when its wait is over, also while another one is written: requests that come one after
another would each be written alone.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from springtide.generation import Part, TextRequest, answer
from springtide.on_ray.serve.follow import Served


@dataclasses.dataclass(eq=False)
class Waiting:
    """A request that waits for its text."""

    request: TextRequest
    checkpoint: str = ""
    """That writes it; known when its batch begins."""
    is_gone: bool = False
    """Whether its client has gone away."""
    new_parts: asyncio.Queue[Part | Exception | None] = dataclasses.field(default_factory=asyncio.Queue)
    """Parts of its text; None after the last, or what its batch failed with."""


class Batches:
    """Writes requests in batches, one batch at a time. Its methods are called in one event loop."""

    def __init__(
        self, served: Callable[[], Served], executor: ThreadPoolExecutor, max_batch: int, batch_wait_s: float
    ) -> None:
        """``served``: returns the model of the next batch; ``executor``: its thread writes; the others: as of ``Serving``."""
        self._served, self._executor = served, executor
        self._max_batch, self._batch_wait_s = max_batch, batch_wait_s
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._came = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def parts(self, one: Waiting) -> AsyncGenerator[Part, None]:
        """Yield the parts of a text as they come. Whoever stops reading them takes the row out of its batch.

        Raises:
            CheckpointError: the model's logits are not numbers.
        """
        self._waiting.append(one)
        self._came.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        try:
            is_last = False
            while not is_last:
                found = [await one.new_parts.get()]
                while not one.new_parts.empty():
                    found.append(one.new_parts.get_nowait())
                if parts := [some for some in found if isinstance(some, Part)]:
                    yield _joined(parts)
                failed = next((some for some in found if isinstance(some, Exception)), None)
                is_last = None in found or bool(parts and parts[-1].ended)
                if failed is not None and not is_last:
                    raise failed
        finally:
            one.is_gone = True
            with contextlib.suppress(ValueError):  # its batch has begun
                self._waiting.remove(one)

    async def _write_all(self) -> None:
        """Write batches until nobody waits."""
        while self._waiting:
            await self._until_full()
            batch = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
            end: Exception | None = None
            try:
                if batch:
                    await self._write(batch)
            except Exception as error:
                end = error
            finally:
                for one in batch:
                    one.new_parts.put_nowait(end)

    async def _until_full(self) -> None:
        """Wait for requests that come soon after the first, or after the end of the batch before: its clients ask again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._batch_wait_s):
                while len(self._waiting) < self._max_batch:
                    self._came.clear()
                    await self._came.wait()

    async def _write(self, batch: Sequence[Waiting]) -> None:
        served, loop = self._served(), asyncio.get_running_loop()
        for one in batch:
            one.checkpoint = served.checkpoint

        def listen(row: int, part: Part) -> None:
            loop.call_soon_threadsafe(batch[row].new_parts.put_nowait, part)

        rows = [one.request for one in batch]
        try:
            await loop.run_in_executor(
                self._executor, answer, served.model, rows, listen, lambda row: not batch[row].is_gone
            )
        finally:
            for one in batch:
                one.is_gone = True  # if this task is cancelled, the thread ends with the next token


def _joined(parts: Sequence[Part]) -> Part:
    return parts[-1]._replace(text="".join(part.text for part in parts))
