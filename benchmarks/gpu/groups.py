"""A process goes through many groups of workers: is its memory clean after each, and does any but the first compile?

In one process, twenty times: a process group, the model laid over it, three steps, the group destroyed. What tensors and the
driver hold is read after each, and how often Dynamo compiled. A second cell changes the rows of a micro-batch from group to
group, as uneven numbers of workers do.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import claims
import torch
from measure import CUDA, NO_GPU, Book, group_of_one, laid_out, random_rows, sync, tidy
from torch._dynamo.utils import counters

from springtide import config as configs
from springtide.config import Config
from springtide.training import train_step

GROUPS, STEPS = 20, 3
HELD_MIB, CLIMB_MIB = 64, 256
"""Most that tensors may hold after a group, and most that the device's use may grow from the second group to the last."""


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    many = 3 if book.quick else GROUPS
    same = book.cell("groups/of one shape", lambda: go_through([2] * many, book.quick))
    no_compile = NO_GPU if book.quick else ""  # a compiler takes half a minute on a CPU
    book.cell("groups/of two shapes in turn", lambda: go_through([2, 1] * 3, book.quick), no_compile)
    if not same:
        return []
    found = [claims.claim("compiled_after_first_group", same["compiled_later"], 0, "lower", same)]
    if CUDA:
        found.append(claims.claim("held_after_a_group_mib", same["held_most_mib"], HELD_MIB, "lower", same))
        found.append(claims.claim("climb_over_groups_mib", same["used_climb_mib"], CLIMB_MIB, "lower", same))
    return found


def config_of(quick: bool) -> tuple[Config, int, int]:
    """Two blocks of 8B's shape, compiled; the length of a row; ids."""
    if CUDA:
        return configs.recipes.llama3_8b().override({"model.num_layers": 2}), 8192, 8192
    return configs.recipes.tiny().override({"parallel.compile": not quick}), 64, 256


def go_through(rows_of_each: list[int], quick: bool) -> dict[str, Any]:
    """One group after the other."""
    torch.compiler.reset()
    counters.clear()
    config, length, vocab_size = config_of(quick)
    firsts, steady, held, used, compiled = [], [], [], [], []
    for rows in rows_of_each:
        times = _group(config, rows, max(rows_of_each), length, vocab_size)
        tidy()
        firsts.append(round(times[0], 3))
        steady.append(round(times[-1], 4))
        held.append(round(torch.cuda.memory_allocated() / 2**20, 1) if CUDA else 0.0)
        used.append(used_mib())
        compiled.append(sum(counters["stats"][name] for name in ("unique_graphs",)))
    later = compiled[-1] - compiled[0]
    return {
        "groups": len(rows_of_each),
        "first_step_s": firsts[0],
        "first_step_later_s": statistics.median(firsts[1:]),
        "first_step_later_most_s": max(firsts[1:]),
        "step_s": statistics.median(steady),
        "compiled_first": compiled[0],
        "compiled_later": later,
        "graph_breaks": sum(counters["graph_break"].values()),
        "held_most_mib": max(held),
        "used_mib": used[-1],
        "used_climb_mib": round(used[-1] - used[min(1, len(used) - 1)], 1),
        "firsts_s": firsts,
        "used_by_group_mib": used,
        "compiled_by_group": compiled,
    }


def _group(config: Config, rows: int, most_rows: int, length: int, vocab_size: int) -> list[float]:
    """Seconds of each step of one group; a compiled model is called with one shape, as in a run."""
    took = []
    with group_of_one() as here:
        model, optimizer = laid_out(config, here, vocab_size)
        tokens_NL, whole = random_rows(rows, length, vocab_size), [slice(0, rows)]
        for _ in range(STEPS):
            begin = time.perf_counter()
            train_step(
                model,
                optimizer,
                tokens_NL,
                0,
                here,
                micro_batches=whole,
                padded_rows=most_rows,
                tokens_per_step=rows * length,
                clip_norm=1.0,
            )
            sync()
            took.append(time.perf_counter() - begin)
    return took


def used_mib() -> float:
    """Of the device, by everybody on it, the driver's contexts included; on a CPU, of this process [MiB]."""
    if CUDA:
        free, whole = torch.cuda.mem_get_info()
        return round((whole - free) / 2**20, 1)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 2**20, 1)
