"""Device helpers: copy batches ahead of the loop, choose kernels, and measure peak memory and peak FLOP/s."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from springtide.config.devices import data_sheet
from springtide.config.engine import ParallelConfig
from springtide.shards import signed
from springtide.stream import Batch, ahead

Tensors = dict[str, Tensor]
"""Name of a column of labels -> its values."""


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor, Tensors]]:
    """Return each batch with its tokens and its labels on ``device``.

    Token ids are int64 (n, L + 1); a token that the loss ignores is ``~id``, a negative number (``shards.signed``). Label ids
    are int32. For a GPU, a thread puts the next batch in pinned memory, so that its copy overlaps with computation.
    """
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
    # convert unsigned integers to int32: torch supports few operations on unsigned integers
    return {
        name: torch.from_numpy(column.astype(np.int32) if column.dtype.kind == "u" else column)
        for name, column in batch.columns.items()
    }


def _each(function: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    return {name: function(one) for name, one in tensors.items()}


def choose_kernels(parallel: ParallelConfig) -> None:
    """Set for this process the number of CPU threads, and whether kernels must be deterministic.

    Examples:
        >>> choose_kernels(ParallelConfig(threads=1))
        >>> torch.get_num_threads()
        1
    """
    if parallel.threads:
        torch.set_num_threads(parallel.threads)
    if parallel.deterministic:  # never turn determinism off: user code may have turned it on
        torch.use_deterministic_algorithms(True)
        # deterministic mode also fills new memory. Turn this off: the code here reads no memory before it is written
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far [bytes]: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The peak FLOP/s of a device, the denominator of MFU, and the source of the number.

_SIZES = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 10


@functools.cache  # measure once: a process keeps its device in all its worker groups
def peak_flops(device: torch.device) -> tuple[float, str]:
    """Return the peak FLOP/s of one device and the source of the number: a data sheet, or a matmul that is timed now."""
    if device.type == "cuda" and (known := data_sheet(torch.cuda.get_device_name(device))):
        return known
    dtype = torch.float32
    if device.type == "cuda":  # tensor cores before Ampere support fp16, but not bf16
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    size, kind = _SIZES[device.type], str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    name = f"unknown {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    source = f"{kind} matmul of {size}x{size} measured on this {name} at start, best of {_ROUNDS}"
    return _measure(device, dtype, size), source


def _measure(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    a @ a
    for _ in range(_ROUNDS):
        wait_for(device)
        begin = time.perf_counter()
        a @ a
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
