"""This rank's state, copied into shared memory beside the next step, whence another process writes it.

The memory is a file of a memory file system that has no name: it is gone with the last process that has it open, however
that ends, and can be taken for no other run's. It is made once and used for every save.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from springtide.checkpoint.format import MARK_BYTES, StagedPiece
from springtide.checkpoint.tensors import box, local, raw, type_name, writes


class StagingPlan:
    """Where the boxes that this rank writes go in a stage: one after the other, wide types first, so that each is aligned
    without gaps. Worked out once: while a group of workers trains, neither names nor boxes change."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._names: list[str] = []
        self.pieces: list[StagedPiece] = []

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return self.pieces[-1].begin + self.pieces[-1].size_bytes if self.pieces else 0

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that this rank writes its boxes of; ``pieces`` then says where they go."""
        if self._names != list(tensors):
            self._names, self.pieces, begin = list(tensors), [], 0
            for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
                if writes(name, tensor, self._rank, self._world_size):
                    size, dtype = local(tensor).nbytes, type_name(tensor.dtype)
                    self.pieces.append(StagedPiece(name, dtype, tuple(tensor.shape), *box(tensor), begin, size))
                    begin += size
        return {piece.tensor: tensors[piece.tensor] for piece in self.pieces}


class StagingBuffer:
    """Shared memory of ``size_bytes`` behind a mark. OSError (ENOSPC) when ``folder`` has not so much."""

    def __init__(self, folder: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # now, rather than a SIGBUS in the middle of a copy
            os.posix_fallocate(file.fileno(), 0, MARK_BYTES + size_bytes)
            self._map = mmap.mmap(file.fileno(), MARK_BYTES + size_bytes)
            self.fd = os.dup(file.fileno())
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes = self._whole[MARK_BYTES:]
        self._copied: threading.Thread | torch.cuda.Event | None = None
        self._pinned = False

    def mark(self, step: int) -> None:
        """Say which step the tensors are of; NO_STEP before they change. Others who map the memory see it."""
        self._map[:8] = step.to_bytes(8, "little", signed=True)

    def copy(self, tensors: Mapping[str, Tensor], staged: list[StagedPiece]) -> None:
        """Begin to copy. The tensors may not change before ``wait`` has returned; the stage is whole when ``settle`` has."""
        pairs = [
            (self._bytes[one.begin : one.begin + one.size_bytes], raw(local(tensors[one.tensor]).contiguous()))
            for one in staged
        ]
        if any(source.is_cuda for _, source in pairs):
            self._copied = self._copy_from_gpu(pairs)
        else:
            self._copied = threading.Thread(target=_copy, args=(pairs,), name="springtide-stage", daemon=True)
            self._copied.start()

    def wait(self) -> None:
        """Let the tensors change: the host waits for a CPU's copy; a GPU's stream waits for its own, the host does not."""
        if isinstance(self._copied, threading.Thread):
            self._copied.join()
        elif self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait until the copy is whole."""
        if isinstance(self._copied, threading.Thread):
            self._copied.join()
        elif self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Let go of the memory; a process that has it open keeps it."""
        self.settle()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
        os.close(self.fd)
        del self._bytes, self._whole
        with contextlib.suppress(BufferError):  # a view of it is alive; the memory goes with the last of them
            self._map.close()

    def _copy_from_gpu(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        if not self._pinned:  # pinned memory is copied to at full speed, and without the host
            torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), self._whole.nbytes, 0)
            self._pinned = True
        beside, done = torch.cuda.Stream(), torch.cuda.Event()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(beside)
            done.record(beside)
        return done


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        np.copyto(target.numpy(), source.numpy())  # one thread, no GIL: torch's own copy would start a thread a core
