"""What the loop asks of its device: rows on it in time, and the most memory it held."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from springtide.stream import Batch, ahead


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """The batches and their tokens, int64 (n, L + 1), on ``device``. For a GPU they reach pinned memory a batch ahead, in a
    thread, so that the copy runs beside the computing."""
    pairs: Iterator[tuple[Batch, Tensor]] = (
        (batch, torch.from_numpy(batch.tokens.astype(np.int64))) for batch in batches
    )
    if device.type == "cuda":
        pairs = ahead((batch, tokens_NL.pin_memory()) for batch, tokens_NL in pairs)
    return ((batch, tokens_NL.to(device, non_blocking=True)) for batch, tokens_NL in pairs)


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
