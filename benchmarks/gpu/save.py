"""What bringing the state to safety takes, and what it costs the work beside it.

stage  the memory that state is copied to: making it, registering it with the driver, GB/s of copies, matrix products beside
save   the state of a few layers by springtide's saver to the local disk: how long training waits, steps beside it, GB/s;
       torch.distributed.checkpoint's synchronous save of the same state; our load of it
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import claims
import torch
from measure import CUDA, DEVICE, NO_GPU, Book, NotHere, group_of_one, laid_out, random_rows, seconds_of, sync
from torch import Tensor, nn

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.async_saver import AsyncSaver
from springtide.checkpoint.format import Meta, committed
from springtide.checkpoint.load import load
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.staging import StagingBuffer, StagingPlan
from springtide.checkpoint.tensors import named_tensors
from springtide.config import Config
from springtide.dist import World
from springtide.store import Folder
from springtide.training import train_step

MEMORY = "/dev/shm"
STAGED = 8 * 2**30 if CUDA else 2**26
"""Bytes that are staged."""
GEMMS, SIZE = (60, 8192) if CUDA else (20, 256)
STEPS = 8 if CUDA else 4
STALL_GOAL = 0.03
"""Of the time of a synchronous save."""


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    book.cell("copy/from the device to pinned memory", pinned, NO_GPU)
    book.cell("copy/into a stage", stage)
    saved = book.cell("save/of a few layers", save)
    if not saved:
        return []
    share = saved["stall_s"] / saved["dcp_s"]
    return [
        claims.claim("stall_over_synchronous_save", share, STALL_GOAL, "lower", saved),
        claims.claim("step_beside_over_step", saved["beside_s"] / saved["step_s"], 1.1, "lower", saved),
    ]


def pinned() -> dict[str, Any]:
    """The ceiling: one copy to memory that the driver has made itself."""
    size = min(STAGED, 2 * 2**30)
    source = torch.randint(255, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    took = min(seconds_of(lambda: target.copy_(source, non_blocking=True)) for _ in range(5))
    return {"gb_per_s": round(size / took / 1e9, 2), "gib": size / 2**30}


def stage() -> dict[str, Any]:
    """A stage as the saver makes it, and what copies into it cost the matrix products of the next step."""
    free = os.statvfs(MEMORY)
    if free.f_bavail * free.f_frsize < STAGED + 2**28:
        raise NotHere(f"{MEMORY} has {free.f_bavail * free.f_frsize >> 20} MiB free of {STAGED >> 20} MiB")
    state = {"state": torch.randint(255, (STAGED,), dtype=torch.uint8, device=DEVICE)}
    layout = StagingPlan(0, 1)
    mine = layout.of(state)
    made: list[StagingBuffer] = []
    make_s = seconds_of(lambda: made.append(StagingBuffer(MEMORY, layout.size_bytes)))
    try:
        return _into(made[0], mine, layout) | {"make_s": round(make_s, 3), "gib": STAGED / 2**30}
    finally:
        made[0].close()


def _into(kept: StagingBuffer, mine: Mapping[str, Tensor], layout: StagingPlan) -> dict[str, Any]:
    a, b = (torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def copy() -> None:
        kept.copy(mine, layout.pieces)
        kept.wait()
        kept.settle()

    def products() -> None:
        for _ in range(GEMMS):
            torch.matmul(a, b, out=out)

    def products_beside() -> None:
        kept.copy(mine, layout.pieces)
        products()

    first_s = seconds_of(copy)  # registers the memory
    copies = [seconds_of(copy) for _ in range(3)]
    seconds_of(products)
    alone, beside = [], []
    for _ in range(3):
        alone.append(seconds_of(products))
        begin = time.perf_counter()
        products_beside()
        if CUDA:
            torch.cuda.current_stream().synchronize()  # of the products alone; the copy has a stream of its own
        beside.append(time.perf_counter() - begin)
        kept.settle()
    copy_s, alone_s = statistics.median(copies), statistics.median(alone)
    return {
        "first_copy_s": round(first_s, 3),
        "copy_s": round(copy_s, 4),
        "gb_per_s": round(STAGED / copy_s / 1e9, 2),
        "products_s": round(alone_s, 4),
        "products_beside_s": round(statistics.median(beside), 4),
        "slower_beside": round(statistics.median(beside) / alone_s, 4),
    }


def config_of() -> tuple[Config, int, int, int]:
    """Two blocks of 8B's shape, 6 GB of state; rows, length, ids."""
    if CUDA:
        changes = {"model.num_layers": 2, "parallel.compile": False}
        return configs.recipes.llama3_8b().override(changes), 2, 8192, 8192
    return configs.recipes.tiny(), 4, 64, 256


def save() -> dict[str, Any]:
    """By the saver, as the loop uses it; then by DCP."""
    config, rows, length, vocab_size = config_of()
    memory = MEMORY if os.path.isdir(MEMORY) else ""
    with tempfile.TemporaryDirectory() as folder, group_of_one() as here:
        model, optimizer = laid_out(config, here, vocab_size)
        step = _step(model, optimizer, here, random_rows(rows, length, vocab_size))
        for _ in range(2):
            step(lambda: None)
        run = Folder(f"{folder}/run")
        number = leases.claim(run, "benchmark").term
        with AsyncSaver(run, number, 0, 1, stage_in=memory, tries=2, rule=Rule(2)) as saver:
            found = _saved(saver, step, model, optimizer)
            saver.end()
        found["dcp_s"] = round(_dcp(f"{folder}/dcp", model, optimizer), 3)
        name = committed(run)[-1]
        took = min(seconds_of(lambda: load(run, name, model, optimizer)) for _ in range(2))
        size = found["state_gb"]
        return found | {"load_s": round(took, 3), "load_gb_per_s": round(size / took, 2), "load_from": "the page cache"}


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, here: World, rows: Tensor
) -> Callable[[Callable[[], None]], float]:
    tokens = rows.shape[0] * (rows.shape[1] - 1)

    def step(before_update: Callable[[], None]) -> float:
        return seconds_of(
            lambda: train_step(
                model,
                optimizer,
                rows,
                0,
                here,
                micro_batches=[slice(0, len(rows))],
                tokens_per_step=tokens,
                clip_norm=1.0,
                before_update=before_update,
            )
        )

    return step


def _saved(
    saver: AsyncSaver, step: Callable[[Callable[[], None]], float], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Two saves, of which the first makes the stage and starts the writing process, as the first of a run does."""
    alone_s = statistics.median(step(lambda: None) for _ in range(STEPS))
    found: dict[str, Any] = {"step_s": round(alone_s, 4)}
    for number in range(2):
        tensors = named_tensors(model, optimizer)
        waits: list[float] = []

        def before_update(waits: list[float] = waits) -> None:
            waits.append(_wall(saver.staged))

        sync()
        begin = time.perf_counter()
        meta = Meta(step=number + 1, tokens=0, world_size=1, order_identity="o", config_fingerprint="c")
        saver.begin(tensors, meta, {})
        asked_s, times = time.perf_counter() - begin, []
        while not times or (outcome := saver.poll()) is None:
            times.append(step(before_update))
        whole_s = time.perf_counter() - begin
        if outcome.error is not None:
            raise outcome.error
        stall_s = asked_s + max(waits[0], times[0] - alone_s)  # the copy's share of the step beside it is stall too
        found["first_stall_s" if number == 0 else "stall_s"] = round(stall_s, 4)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return found | {
        "beside_s": round(statistics.median(times[1:] or times), 4),
        "save_s": round(whole_s, 3),
        "state_gb": round(size / 1e9, 4),
        "save_gb_per_s": round(size / whole_s / 1e9, 2),
    }


def _wall(function: Callable[[], None]) -> float:
    """As the host sees it: what the device goes on with is not waited for."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """torch's own, while training waits [s]."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def write() -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)

    return seconds_of(write)
