"""A run of 1.3B under torchrun with a save every 20 steps: how long training waits for each, and how many are skipped.

The state is copied to the memory of the host and written to the local disk in the background; a save that is due while the one
before is still being written is skipped, and counted. The text is bytes, so head and embedding are small: 1.2B weights.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import claims
import runs
from measure import CUDA, GIGA, Book, NotHere

from springtide import config as configs
from springtide.model import skeleton

EVERY, STEPS = (20, 100) if CUDA else (4, 12)
ROWS, LENGTH, BYTES = (8, 2048, 259) if CUDA else (4, 64, 259)
STALL_GOAL = 0.1
"""Of a step."""
BYTES_A_WEIGHT, COPIES = 12, 3
"""fp32 weights and moments; checkpoints that the disk must hold at a time."""
MEMORY = "/dev/shm"


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cell; return its claims."""
    found = book.cell("1.3B" if CUDA else "tiny", train)
    if not found or not CUDA:
        return []
    share = found["stall_s"] / found["step_s"]
    return [claims.claim("stall of a save over a step", share, STALL_GOAL, "lower", found)]


def train() -> dict[str, Any]:
    """Train; raises NotHere if disk or memory has too little room for the state."""
    recipe = configs.recipes.gpu_1b() if CUDA else configs.recipes.tiny()
    recipe = recipe.override({"corpus.tokenizer": "bytes", "shards.sequence_length": LENGTH})
    size = BYTES_A_WEIGHT * sum(one.numel() for one in skeleton(recipe.model, BYTES).parameters())
    with tempfile.TemporaryDirectory() as folder:
        for where, needed in ((folder, COPIES * size), (MEMORY, size)):
            if (free := shutil.disk_usage(where).free) < needed:
                raise NotHere(f"{where} has {free / GIGA:.0f} GB free, and {needed / GIGA:.0f} GB are needed")
        often = {"checkpoint__every_steps": EVERY, "checkpoint__keep_last": 1, "checkpoint__when_busy": "skip"}
        config = runs.on_text_at_hand(recipe, folder, "saves", ROWS, STEPS, corpus__max_files=100, **often)
        runs.torchrun(config, folder)
        return runs.figures(runs.journal(config), EVERY // 2)
