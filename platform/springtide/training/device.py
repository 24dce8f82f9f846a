"""Rows on the device in time for the loop, and the device's peak memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from springtide.config.engine import ParallelConfig
from springtide.shards import signed
from springtide.stream import Batch, ahead

Tensors = dict[str, Tensor]
"""Name of a column of labels -> its values."""


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor, Tensors]]:
    """Return the batches, their tokens on ``device``, int64 (n, L + 1), negative where they are not predicted
    (``shards.signed``), and their labels there, ids as int32. For a GPU a thread puts them in pinned memory one batch ahead:
    the copy runs during computation."""
    found: Iterator[tuple[Batch, Tensor, Tensors]] = (
        (batch, torch.from_numpy(signed(batch.tokens)), _tensors(batch)) for batch in batches
    )
    if device.type == "cuda":
        found = ahead(
            (batch, tokens_NL.pin_memory(), _each(Tensor.pin_memory, more)) for batch, tokens_NL, more in found
        )

    def there(one: Tensor) -> Tensor:
        return one.to(device, non_blocking=True)

    return ((batch, there(tokens_NL), _each(there, more)) for batch, tokens_NL, more in found)


def _tensors(batch: Batch) -> Tensors:
    # torch computes little with unsigned integers
    return {
        name: torch.from_numpy(column.astype(np.int32) if column.dtype.kind == "u" else column)
        for name, column in batch.columns.items()
    }


def _each(function: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    return {name: function(one) for name, one in tensors.items()}


def choose_kernels(parallel: ParallelConfig) -> None:
    """Set for this process how many threads compute on its CPUs, and whether kernels give the same bits each time.

    Examples:
        >>> choose_kernels(ParallelConfig(threads=1))
        >>> torch.get_num_threads()
        1
    """
    if parallel.threads:
        torch.set_num_threads(parallel.threads)
    if parallel.deterministic:  # otherwise as it is: a user's own code may have asked for it
        torch.use_deterministic_algorithms(True)
        # all that is read here was written before
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
