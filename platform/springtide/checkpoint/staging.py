"""Copy this rank's state to shared memory during the next step; another process writes the copy to the store.

The memory is an unnamed file in a memory file system. It is freed when the last process that has it open ends, even if that
process is killed, and no other run can open it by mistake. It is allocated once and reused by every save.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from springtide.checkpoint.commit import cut
from springtide.checkpoint.format import BLOCK_BYTES, StagedPiece
from springtide.checkpoint.shared_memory import GROUP_BYTES, MARK_BYTES, mark
from springtide.checkpoint.tensors import box, local, raw, type_name, writes
from springtide.storage import digest

T = TypeVar("T")


def in_thread(name: str, function: Callable[[], T], *, daemon: bool) -> Future[T]:
    """Call ``function`` in a new thread. The returned future holds its result or its exception. ``daemon``: this process does
    not wait for the thread when it exits."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            found = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=call, name=name, daemon=daemon).start()
    return future


class StagingPlan:
    """Layout of the staging buffer: the offset of each box (part of a tensor) that this rank writes. Boxes follow each other,
    wide types first, so that each is aligned without gaps. Computed once: names and boxes do not change while a worker group
    trains."""

    def __init__(self, rank: int, world_size: int, among: Collection[int] | None = None) -> None:
        """``among``: if given, only these ranks write (``tensors.writes``)."""
        self._rank, self._world_size, self._among = rank, world_size, among
        self._names: list[str] = []
        self.pieces: list[StagedPiece] = []

    @property
    def size_bytes(self) -> int:
        """Size of all boxes that this rank writes."""
        return self.pieces[-1].begin + self.pieces[-1].size_bytes if self.pieces else 0

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that this rank writes a box of, and set ``pieces`` to the boxes and their places in the buffer."""
        if self._names != list(tensors):
            self._names, self.pieces, begin = list(tensors), [], 0
            for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
                if writes(name, tensor, self._rank, self._world_size, self._among):
                    size, dtype = local(tensor).nbytes, type_name(tensor.dtype)
                    self.pieces.append(StagedPiece(name, dtype, tuple(tensor.shape), *box(tensor), begin, size))
                    begin += size
        return {piece.tensor: tensors[piece.tensor] for piece in self.pieces}


class StagingBuffer:
    """Shared memory: a header (``shared_memory.mark``), then ``size_bytes`` for tensors. The constructor raises OSError
    (ENOSPC) if ``folder`` has too little space."""

    def __init__(self, folder: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # allocate the memory now: otherwise a full file system raises SIGBUS in the middle of a copy
            os.posix_fallocate(file.fileno(), 0, MARK_BYTES + size_bytes)
            self._map = mmap.mmap(file.fileno(), MARK_BYTES + size_bytes)
            self.fd = os.dup(file.fileno())
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes = self._whole[MARK_BYTES:]
        self._copied: Future[None] | torch.cuda.Event | None = None
        self._pinned = False

    def mark(self, step: int, group: bytes = bytes(GROUP_BYTES)) -> None:
        """Write the mark, the buffer's header: the step of the tensors, and ``group``, a random id of the rank that copies
        them. Before the bytes change, set the step to NO_STEP. Other processes that map the memory see the mark."""
        found = mark(step, group)
        self._map[: len(found)] = found

    def digests(self, staged: list[StagedPiece]) -> tuple[tuple[str, ...], ...]:
        """Return the digests of the blocks of each piece (box of a tensor) in ``staged``. Call it after ``settle``."""
        data = self._bytes.numpy().data
        views = (data[one.begin : one.begin + one.size_bytes] for one in staged)
        return tuple(tuple(digest.of_bytes(block) for block in cut(view, BLOCK_BYTES)) for view in views)

    def copy(self, tensors: Mapping[str, Tensor], staged: list[StagedPiece]) -> None:
        """Begin to copy ``tensors`` to the offsets in this buffer that ``staged`` lists. The tensors must not change before
        ``wait`` returns; the copy is complete when ``settle`` returns."""
        pairs = [
            (self._bytes[one.begin : one.begin + one.size_bytes], raw(local(tensors[one.tensor]).contiguous()))
            for one in staged
        ]
        if any(source.is_cuda for _, source in pairs):
            self._copied = self._copy_from_gpu(pairs)
        else:
            self._copied = in_thread("springtide-stage", lambda: _copy(pairs), daemon=True)

    def wait(self) -> None:
        """Wait until the tensors may change. For CPU tensors the calling thread waits; for GPU tensors only the current CUDA
        stream waits."""
        if isinstance(self._copied, Future):
            wait([self._copied])
        elif self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait until the copy is complete. Raises the exception of the copy if it failed."""
        if isinstance(self._copied, Future):
            self._copied.result()
        elif self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Close the memory in this process. It is kept for other processes that have it open."""
        with contextlib.suppress(Exception):  # a failed copy has ended too, so nothing uses the memory
            self.settle()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
        os.close(self.fd)
        del self._bytes, self._whole
        with contextlib.suppress(BufferError):  # views of the map still exist; the memory is freed with the last view
            self._map.close()

    def _copy_from_gpu(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        if not self._pinned:  # a copy to pinned memory runs at full speed and does not block the CPU
            torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), self._whole.nbytes, 0)
            self._pinned = True
        beside, done = torch.cuda.Stream(), torch.cuda.Event()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:  # with parallel.offload most sources are on the CPU
                    # without this, the allocator could reuse the memory of a freed source before the copy ends
                    source.record_stream(beside)
            done.record(beside)
        return done


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        np.copyto(target.numpy(), source.numpy())  # NumPy: one thread, releases the GIL; torch: one thread per core
