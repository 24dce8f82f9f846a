"""The head's loss inside the step: compiled between its products, against single operations, at 1.3B and 125M."""

from __future__ import annotations

import functools
from typing import Any

import claims
from measure import CUDA, Book, Variant, alternate, random_rows
from torch import nn

from springtide import config as configs
from springtide.config import Config

MFU_GOAL = 0.52
"""Of 1.3B, of the bf16 peak."""
COMPILED, SINGLE = "compiled", "single operations"


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    claimed = []
    for name, (config, rows, vocab_size) in cases().items():
        batch = random_rows(rows, config.shards.sequence_length, vocab_size)
        variants = {COMPILED: Variant(config), SINGLE: Variant(config, change=by_single_operations)}
        rounds, seconds = (1, 0.2) if book.quick else (2, 3.0)
        found = book.cell(name, functools.partial(alternate, variants, batch, vocab_size, rounds, seconds))
        if found and CUDA:
            ratio = found[COMPILED]["tokens_per_s"] / found[SINGLE]["tokens_per_s"]
            claimed.append(claims.claim(f"compiled over single operations, {name}", ratio, 1.0, "higher", found))
            if name == "1.3B":
                claimed.append(claims.claim("mfu of 1.3B", found[COMPILED]["mfu"], MFU_GOAL, "higher", found))
    return claimed


def cases() -> dict[str, tuple[Config, int, int]]:
    """Return name -> config, rows, ids."""
    if not CUDA:  # where the loss is never compiled: both variants are the same code
        return {"tiny": (configs.recipes.tiny().override({"parallel.precision": "bf16"}), 4, 256)}
    compiled = {"parallel.compile": True}
    return {
        "1.3B": (configs.recipes.gpu_1b().override({"shards.sequence_length": 2048}), 8, 50304),
        "125M": (configs.recipes.gpu_125m().override(compiled), 32, 50304),
    }


def by_single_operations(model: nn.Module) -> None:
    """Have a model compute the head's loss as without ``parallel.compile``."""
    model.fused_loss = None  # type: ignore[assignment]
