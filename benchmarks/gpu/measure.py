"""What the stages share: the book of a stage's cells, checks that a cell can run here, clocks, and the step of a model.

A cell is one measurement with a name; its values are a dict whose names end with their units, or one such dict for each variant
that it compares. The book is a section of one JSON file, written after every cell, so that a stage that is killed loses only
the cell it was at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from springtide.config import Config
from springtide.distributed import World, backend, world
from springtide.distributed.fsdp import parallelize
from springtide.model import flops_per_token, skeleton
from springtide.optim.build import may_fuse, optimizer_of
from springtide.optim.parameter_groups import freeze
from springtide.planning.device_memory import usable_bytes
from springtide.planning.step_memory import predicted_bytes
from springtide.training import StepSetup, Work, train_step
from springtide.training.device import peak_flops
from springtide.training.nvml import gpu_of

CUDA = torch.cuda.is_available()
KIND = "cuda" if CUDA else "cpu"
DEVICE = torch.device(KIND, 0) if CUDA else torch.device("cpu")
NO_GPU = "" if CUDA else "needs a GPU"
"""Why a cell that only a GPU can measure is skipped; empty where there is one."""
GIGA = 1e9
TRIES = 2
"""How often a cell that ends its process is begun."""
CLIP = 1.0
LEAST_CLOCK = 0.5
"""Of the highest clock, under load; below it the clocks are held down."""
BEGIN, END = 1, 0
"""Ids that begin and end a document of ``rows_of_documents``."""


class NotHere(Exception):
    """A cell asks for something that this machine or this torch does not have."""


def facts() -> dict[str, Any]:
    """Return the machine and its software."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if not CUDA:
        return found
    here = torch.cuda.get_device_properties(DEVICE)
    return found | {
        "capability": f"{here.major}.{here.minor}",
        "device_bytes": torch.cuda.mem_get_info()[1],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
    }


class Book:
    """The cells of one stage, in one file with those of the others. Measured cells of the same identity are kept."""

    def __init__(self, stage: str, key: str, file: Path, quick: bool, seconds: float, force: bool = False) -> None:
        """``key``: of the stage's code; ``seconds``: after which no further cell is begun."""
        self.stage, self.quick, self._file = stage, quick, file
        self._end = time.monotonic() + seconds
        identity = {"key": key, "torch": torch.__version__, "device": device_name(), "quick": quick}
        self._found: dict[str, Any] = {"date": datetime.date.today().isoformat(), **identity, "finished": False}
        self._found |= {"facts": facts(), "seconds": 0.0, "cells": {}, "claims": [], "running": ""}
        before = {} if force else self._read().get(stage, {})
        if all(before.get(name) == value for name, value in identity.items()):
            self._found["cells"], self._found["seconds"] = before["cells"], before["seconds"]
            if name := before["running"]:
                ended = before["cells"].get(name, {}).get("ended", 0) + 1
                why = "the process ended, or was ended for its time, in this cell"
                self._found["cells"][name] = {"status": "failed", "why": why, "ended": ended}
        self._began = time.monotonic() - self._found["seconds"]

    def cell(
        self, name: str, measure: Callable[[], dict[str, Any]], missing: str = "", is_timed: bool = True
    ) -> dict[str, Any] | None:
        """Return the values of cell ``name``: those in the book, or what ``measure`` returns. Return None where it is skipped,
        failed, or left out because the time is spent; the book has the reason.

        Args:
            name: of the cell.
            measure: called if the cell was not measured before.
            missing: what this machine lacks for it; empty for nothing.
            is_timed: whether clocks that are held down spoil it.
        """
        known = self._found["cells"].get(name, {})
        if known.get("status") == "measured":
            values: dict[str, Any] = known["values"]
            return values
        if known.get("ended", 0) >= TRIES:  # it would end the process once more, and take the later cells with it
            return None
        if missing := missing or (clocks_held_down() if is_timed else ""):
            return self._write(name, {"status": "skipped", "why": missing})
        if self._end <= time.monotonic():
            return self._write(name, {"status": "left out", "why": "the stage's time is spent"})
        self._found["running"] = name
        self._save()
        begin = time.monotonic()
        try:
            found = {"status": "measured", "values": measure()}
        except NotHere as error:
            found = {"status": "skipped", "why": str(error)}
        except Exception as error:
            found = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:1500]}
            found["trace"] = traceback.format_exc()[-3000:]
        self._found["running"] = ""
        tidy()
        return self._write(name, found | {"cell_s": round(time.monotonic() - begin, 2)})

    def end(self, claims: list[dict[str, Any]]) -> int:
        """Write the claims; return the exit status, 1 where a cell failed or time was short."""
        states = {cell["status"] for cell in self._found["cells"].values()}
        self._found["claims"], self._found["finished"] = claims, states <= {"measured", "skipped"}
        self._save()
        return 0 if self._found["finished"] else 1

    def _write(self, name: str, found: dict[str, Any]) -> dict[str, Any] | None:
        self._found["cells"][name] = found
        shown = found.get("values") or found.get("why")
        print(f"{self.stage}: {name}: {found['status']}: {json.dumps(shown)}", flush=True)
        self._save()
        values: dict[str, Any] | None = found.get("values")
        return values

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        return found

    def _save(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._began, 1)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self._read() | {self.stage: self._found}, indent=1) + "\n")
        beside.replace(self._file)


@functools.cache
def device_name() -> str:
    """Return the GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(DEVICE) if CUDA else "cpu"


@functools.cache
def clocks_held_down() -> str:
    """Return why this GPU's times would be worth nothing; empty if they are good, or NVML cannot be asked."""
    gpu = gpu_of(DEVICE)
    if gpu is None:
        return ""
    import pynvml

    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(100):  # 0.15 s of work in the queue: the clock is read while the device computes
        matrix @ matrix
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}")
        highest = float(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except pynvml.NVMLError:
        highest = 0.0
    found = held_down(gpu.figures(0).clock_mhz, highest, gpu.remarks())
    sync()
    return found


def held_down(clock_mhz: float | None, highest_mhz: float, remarks: Sequence[str]) -> str:
    """Return why times would be worth nothing, of what NVML reports under load; empty if they are good.

    Args:
        clock_mhz: the clock now; None if unknown.
        highest_mhz: the highest clock of the card; 0 if unknown.
        remarks: what costs speed, as sentences.
    """
    if lowered := [one for one in remarks if "clocks" in one]:
        return lowered[0]
    if clock_mhz and highest_mhz and clock_mhz < LEAST_CLOCK * highest_mhz:
        return (
            f"its clock is held at {clock_mhz:.0f} of {highest_mhz:.0f} MHz under load (nvidia-smi --reset-gpu-clocks)"
        )
    return ""


def check_memory(config: Config, vocab_size: int, rows: int, length: int) -> dict[str, float]:
    """Return the predicted peak of a step [GB]. Raises NotHere if this device has less. The process must not be in a process
    group."""
    settings = {"elastic.gpus_per_worker": int(CUDA), "elastic.max_workers": 1, "stream.global_batch": rows}
    config = config.override(settings | {"train.micro_batch": rows, "shards.sequence_length": length})
    needed = predicted_bytes(config, vocab_size, None, 1)
    if CUDA and needed > (usable := usable_bytes(config, torch.cuda.mem_get_info()[1])):
        raise NotHere(f"takes about {needed / GIGA:.0f} GB, and {usable / GIGA:.0f} GB of this device can be used")
    return {"predicted_gb": figure(needed / GIGA)}


def tidy() -> None:
    """Let go of what a cell held on the device."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sync() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def peak_gb() -> float:
    """Return the most that tensors held on the device since the last ``tidy`` [GB]; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / GIGA, 2) if CUDA else 0.0


def figure(value: float) -> float:
    """Return ``value`` to five digits, however small."""
    return float(f"{value:.5g}")


def gemm_tflops(seconds: float = 0.2) -> float:
    """Measure bf16 matrix products of this minute, on random numbers: 8192^3 on a GPU, 256^3 on a CPU [TFLOP/s]."""
    size = 8192 if CUDA else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return figure(2 * size**3 / seconds_of_one(lambda: torch.matmul(a, b, out=out), seconds) / 1e12)


def seconds_of_one(function: Callable[[], Any], seconds: float) -> float:
    """Return the time of one call, of as many as take about so many seconds, waited for together after three that warm up."""
    for _ in range(3):
        function()
    sync()
    begin = time.perf_counter()
    function()
    sync()
    times = max(3, round(seconds / max(1e-6, time.perf_counter() - begin)))
    begin = time.perf_counter()
    for _ in range(times):
        function()
    sync()
    return (time.perf_counter() - begin) / times


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train a model, for a comparison."""

    config: Config
    eos_id: int | None = None
    """Keeps the documents of a row apart if it is the id that ends one."""
    change: Callable[[nn.Module], None] = lambda model: None
    """Called with the model when it is laid out."""


def alternate(
    variants: Mapping[str, Variant],
    rows: Tensor,
    vocab_size: int,
    rounds: int = 2,
    seconds: float = 3.0,
    predicts: bool = True,
) -> dict[str, Any]:
    """Train each variant in turn, ``rounds`` times; who goes first changes. Raises NotHere if one does not fit the device.

    Args:
        variants: name -> the variant.
        rows: token ids of a step, int64 (rows, length + 1), on the device.
        vocab_size: of the ids.
        rounds: number of rounds.
        seconds: of steps in each [s].
        predicts: whether to predict the peak of memory before; moments in int8 take half a minute for that.

    Returns:
        Variant -> tokens/s, the share of the bf16 peak (MFU), the peak of memory, and its parts.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    found: dict[str, Any] = {}
    for name, variant in variants.items():
        found[name] = check_memory(variant.config, vocab_size, len(rows), rows.shape[1] - 1) if predicts else {}
    for number in range(rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            gemm = gemm_tflops()
            tidy()
            try:
                first_s, step_s = _train(variants[name], rows, vocab_size, seconds)
            except torch.OutOfMemoryError as error:
                raise NotHere(f"{name} does not fit: {str(error)[:200]}") from None
            tokens = rows[:, 1:].numel()
            rates[name].append(tokens / step_s)
            found[name].setdefault("first_step_s", round(first_s, 2))
            found[name] |= {"peak_gb": peak_gb(), "gemm_tflops": gemm}
            tidy()
    peak, source = peak_flops(DEVICE)
    for name, variant in variants.items():
        flops = flops_per_token(skeleton(variant.config.model, vocab_size, None), rows.shape[1] - 1)
        rate = statistics.median(rates[name])
        found[name] = {
            "tokens_per_s": round(rate, 1),
            "mfu": figure(flops * rate / peak),
            "mfu_of_gemm": figure(flops * rate / found[name]["gemm_tflops"] / 1e12),
            "step_s": figure(rows[:, 1:].numel() / rate),
            "spread": figure(max(rates[name]) / min(rates[name])),
            **found[name],
        }
    return found | {"rows": len(rows), "length": rows.shape[1] - 1, "rounds": rounds, "peak_source": source}


def _train(variant: Variant, rows: Tensor, vocab_size: int, seconds: float) -> tuple[float, float]:
    """Return the seconds of the first step and of a later one."""
    with training(variant, vocab_size) as step:
        begin = time.perf_counter()
        step(rows)
        sync()
        first_s = time.perf_counter() - begin
        return first_s, seconds_of_one(lambda: step(rows), seconds)


@contextlib.contextmanager
def training(variant: Variant, vocab_size: int) -> Iterator[Callable[[Tensor], float]]:
    """Yield springtide's step in a process group of one: it trains on rows, and returns the loss [nats]."""
    if variant.config.parallel.compile:
        torch.compiler.reset()  # else shapes of earlier cells count against the limit on compiling one function
    with group_of_one() as here:
        model, optimizer = laid_out(variant.config, here, vocab_size, variant.eos_id)
        variant.change(model)

        setup = StepSetup(model, optimizer, here, clip_norm=CLIP)

        def step(rows: Tensor) -> float:
            return train_step(setup, Work(rows, [slice(0, len(rows))], rows[:, 1:].numel())).loss

        yield step


@contextlib.contextmanager
def group_of_one() -> Iterator[World]:
    """A process group of one on this machine's device."""
    dist.init_process_group(backend(KIND), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield world(KIND)
    finally:
        dist.destroy_process_group()


def laid_out(
    config: Config, here: World, vocab_size: int, eos_id: int | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model as a run lays it out, with weights drawn on the device, and its optimizer."""
    made = skeleton(config.model, vocab_size, eos_id, None if eos_id is None else BEGIN)
    freeze(made, config.optim)
    model = parallelize(made, config.parallel, here)
    draw(model)
    return model, optimizer_of(model, config.optim, may_fuse(config.parallel, here.device))


@torch.no_grad()
def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw weights as large as a run's first ones, the same for every layout of a model. A run draws its own on one core, 10 s
    for 1e9 weights."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        here = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if here.dim() < 2:
            here.fill_(1.0)
        elif here.is_floating_point():
            made = generators.get(here.device) or torch.Generator(here.device).manual_seed(seed)
            here.normal_(0.0, 0.02, generator=generators.setdefault(here.device, made))


def random_rows(rows: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Return token ids, int64 (rows, length + 1), on the device; none of them is BEGIN or END."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(max(BEGIN, END) + 1, vocab_size, (rows, length + 1), device=DEVICE, generator=generator)


def rows_of_documents(rows: int, length: int, vocab_size: int, documents: int) -> Tensor:
    """Return ``random_rows`` in which each row holds ``documents`` documents of one length."""
    found, each = random_rows(rows, length, vocab_size), length // documents
    found[:, :-1:each] = BEGIN
    found[:, each - 1 :: each] = END
    return found
