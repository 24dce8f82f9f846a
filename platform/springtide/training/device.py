"""Rows on the device in time for the loop, and the device's peak memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from springtide.shards import signed
from springtide.stream import Batch, ahead


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """Return the batches and their tokens on ``device``, int64 (n, L + 1), negative where they are not predicted
    (``shards.signed``). For a GPU a thread puts them in pinned memory one batch ahead: the copy runs during computation."""
    pairs: Iterator[tuple[Batch, Tensor]] = ((batch, torch.from_numpy(signed(batch.tokens))) for batch in batches)
    if device.type == "cuda":
        pairs = ahead((batch, tokens_NL.pin_memory()) for batch, tokens_NL in pairs)
    return ((batch, tokens_NL.to(device, non_blocking=True)) for batch, tokens_NL in pairs)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
