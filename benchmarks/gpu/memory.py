"""What of the device's memory a step fills, beside what was predicted; what is there before it, and between segments.

Before the first tensor: the process's context and its libraries. Then two blocks of 8B's shape, with all that
``parallel.offload`` can leave to the host: the peak of tensors against the prediction, what the allocator has reserved
for them, and what a step takes. Last, groups of other micro-batches one after the other: what is reserved and not filled.
"""

from __future__ import annotations

import resource
import statistics
from typing import Any

import claims
import torch
from groups import config_of
from measure import CUDA, GIGA, NO_GPU, Book, figure, group_of_one, laid_out, random_rows, seconds_of, tidy

from springtide.app.device_memory import CONTEXT_BYTES, usable_bytes
from springtide.config import Config
from springtide.training import train_step
from springtide.training.memory_estimate import predicted_bytes

OFF = 0.1
"""Most that the peak may differ from the prediction, of the prediction."""
HOLES = 0.04
"""Most that may be reserved and unused at a peak, of what is reserved, as ``app/device_memory.py`` assumes."""


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    context = book.cell("memory/before the first tensor", before, NO_GPU)
    config, length, vocab_size = config_of(True)
    config = config.override({"parallel.recompute": "full", "stream.global_batch": max(2, config.elastic.max_workers)})
    found: list[dict[str, Any]] = []
    for offload in ("none", "activations", "parameters", "all"):
        layout = config.override({"parallel.offload": offload})
        cell = book.cell(f"offload/{offload}", lambda layout=layout: step(layout, length, vocab_size))
        if cell and CUDA:
            away = abs(cell["peak_gb"] / cell["predicted_gb"] - 1)
            found.append(claims.claim(f"predicted offload {offload}", figure(away), OFF, "lower", cell))
    holes = book.cell("memory/holes between segments", lambda: between(config, length, vocab_size), NO_GPU)
    if holes:
        found.append(claims.claim("holes", holes["unused_share"], HOLES, "lower", holes))
    if context:
        found.append(claims.claim("context_gb", context["context_gb"], CONTEXT_BYTES / GIGA, "lower", context))
    return found


def before() -> dict[str, Any]:
    """What is in use before the first tensor, after the first product, and what is left to a step."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    one @ one
    torch.cuda.synchronize()
    left, _ = torch.cuda.mem_get_info()
    context = total - left - torch.cuda.memory_reserved()
    alone = Config().override({"elastic.gpus_per_worker": 1, "elastic.max_workers": 1})
    return {
        "total_gb": figure(total / GIGA),
        "at_first_gb": figure((total - free) / GIGA),
        "context_gb": figure(context / GIGA),
        "usable_gb": figure(usable_bytes(alone, total, context) / GIGA),
    }


def step(config: Config, length: int, vocab_size: int, rows: int = 2) -> dict[str, Any]:
    """A step's peak and time."""
    settings = {"elastic.gpus_per_worker": int(CUDA), "train.micro_batch": rows, "shards.sequence_length": length}
    config = config.override(settings)
    predicted = predicted_bytes(config, vocab_size, None, 1)
    tidy()
    took = _steps(config, length, vocab_size, rows)
    reserved = torch.cuda.max_memory_reserved() / GIGA if CUDA else 0.0
    return {
        "predicted_gb": figure(predicted / GIGA),
        "peak_gb": figure(torch.cuda.max_memory_allocated() / GIGA) if CUDA else 0.0,
        "reserved_gb": figure(reserved),
        "host_gb": figure(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGA),
        "step_s": figure(took),
    }


def between(config: Config, length: int, vocab_size: int) -> dict[str, Any]:
    """Groups of one, two and four rows at once, up and down."""
    shares = []
    for rows in (1, 4, 2, 1, 4):
        torch.cuda.reset_peak_memory_stats()
        _steps(config, length, vocab_size, rows)
        shares.append(1 - torch.cuda.max_memory_allocated() / torch.cuda.max_memory_reserved())
    return {"unused_share": figure(max(shares)), "unused_share_median": figure(statistics.median(shares))}


def _steps(config: Config, length: int, vocab_size: int, rows: int) -> float:
    """Median of three steps after one [s]."""
    with group_of_one() as here:
        model, optimizer = laid_out(config, here, vocab_size)
        rows_NL, whole = random_rows(rows, length, vocab_size), [slice(0, rows)]
        how: dict[str, Any] = {"micro_batches": whole, "tokens_per_step": rows * length, "clip_norm": 1.0}
        took = [seconds_of(lambda: train_step(model, optimizer, rows_NL, 0, here, **how)) for _ in range(4)]
    return statistics.median(took[1:])
