"""What the stages share: the machine in facts, the book of a stage's cells, clocks, the matrix product of the minute, energy,
and a process group of one with a model in it.

A cell is one measurement with a name ``group/which``; its values are a flat dict whose names end with their units. The book is
one JSON file a stage, written again after every cell, so that a stage that is killed loses only the cell it was at.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from springtide.config import Config, code_fingerprint
from springtide.dist import World, backend, world
from springtide.model import skeleton
from springtide.parallel import parallelize
from springtide.training.optim import may_fuse, optimizer_of

CUDA = torch.cuda.is_available()
KIND = "cuda" if CUDA else "cpu"
DEVICE = torch.device(KIND, 0) if CUDA else torch.device("cpu")
NO_GPU = "" if CUDA else "needs a GPU"
"""Why a cell that only a GPU can measure is skipped; empty where there is one."""
GIGA = 1e9
TRIES = 2
"""Processes that a cell may take with it."""


class NotHere(Exception):
    """A cell asks for something that this machine or this torch does not have."""


def facts() -> dict[str, Any]:
    """The machine and its software."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "host_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if not CUDA:
        return found | {"device": "cpu"}
    here = torch.cuda.get_device_properties(DEVICE)
    return found | {
        "device": here.name,
        "capability": f"{here.major}.{here.minor}",
        "device_bytes": torch.cuda.mem_get_info()[1],
        "multiprocessors": here.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
    }


def identity() -> dict[str, str]:
    """What a finished stage must agree with to be left out: this code, this torch, this device."""
    here = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        here.update(path.read_bytes())
    device = torch.cuda.get_device_name(DEVICE) if CUDA else "cpu"
    benchmark = here.hexdigest()[:16]
    return {"code": code_fingerprint(), "benchmark": benchmark, "torch": torch.__version__, "device": device}


class Book:
    """The cells of one stage, in ``folder/STAGE.json``. Cells of the same identity that are measured already are kept."""

    def __init__(self, stage: str, folder: Path, quick: bool, seconds: float, force: bool = False) -> None:
        """``seconds``: after which no further cell is begun."""
        self.quick, self._end = quick, time.monotonic() + seconds
        self._path = folder / f"{stage}.json"
        self._told: dict[str, Any] = {"stage": stage, "quick": quick, "finished": False, "identity": identity()}
        self._told |= {"facts": facts(), "seconds": 0.0, "cells": {}, "claims": [], "running": ""}
        before = json.loads(self._path.read_text()) if self._path.exists() and not force else {}
        if all(before.get(key) == self._told[key] for key in ("identity", "quick")):
            self._told["cells"], self._told["seconds"] = before["cells"], before["seconds"]
            self.finished, self._told["claims"] = before["finished"], before["claims"]
            if name := before["running"]:
                ended = self._told["cells"].get(name, {}).get("ended", 0) + 1
                why = "the process ended, or was ended for its time, in this cell"
                self._told["cells"][name] = {"status": "failed", "why": why, "ended": ended}
        else:
            self.finished = False
        self._began = time.monotonic() - self._told["seconds"]

    @property
    def left_s(self) -> float:
        """Until no further cell is begun."""
        return self._end - time.monotonic()

    def cell(self, name: str, measure: Callable[[], dict[str, Any]], missing: str = "") -> dict[str, Any] | None:
        """The values of cell ``name``: those in the book, or what ``measure`` returns. None, and the book says why, where it is
        skipped because of what is ``missing`` here, failed, or is left out because the time is spent."""
        known = self._told["cells"].get(name, {})
        if known.get("status") in ("measured", "skipped"):
            return known.get("values")
        if known.get("ended", 0) >= TRIES:  # it would take those after it along again
            return None
        if missing:
            return self._write(name, {"status": "skipped", "why": missing})
        if self.left_s <= 0:
            return self._write(name, {"status": "left out", "why": "the stage's time is spent"})
        self._told["running"] = name
        self._save()
        begin = time.monotonic()
        try:
            found = {"status": "measured", "values": measure()}
        except NotHere as error:
            found = {"status": "skipped", "why": str(error)}
        except Exception as error:
            found = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:1500]}
            found["trace"] = traceback.format_exc()[-3000:]
        self._told["running"] = ""
        tidy()
        return self._write(name, found | {"cell_s": round(time.monotonic() - begin, 2)})

    def _write(self, name: str, found: dict[str, Any]) -> dict[str, Any] | None:
        self._told["cells"][name] = found
        told = found.get("values") or found.get("why")
        print(f"{self._told['stage']}: {name}: {found['status']}: {json.dumps(told)}", flush=True)
        self._save()
        values: dict[str, Any] | None = found.get("values")
        return values

    def values(self) -> dict[str, dict[str, Any]]:
        """Of all cells that were measured."""
        cells = self._told["cells"]
        return {name: cell["values"] for name, cell in cells.items() if cell["status"] == "measured"}

    def end(self, claims: list[dict[str, Any]]) -> int:
        """Write the claims; returns the exit status, 1 where a cell failed or time was short."""
        states = {cell["status"] for cell in self._told["cells"].values()}
        self._told["claims"], self._told["finished"] = claims, states <= {"measured", "skipped"}
        self._save()
        return 0 if self._told["finished"] else 1

    def _save(self) -> None:
        self._told["seconds"] = round(time.monotonic() - self._began, 1)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._told, indent=1))
        beside.replace(self._path)


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
    """Most that tensors held on the device since the last ``tidy`` [GB]; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / GIGA, 2) if CUDA else 0.0


def figure(value: float) -> float:
    """To five digits, however small."""
    return float(f"{value:.5g}")


def seconds_of(function: Callable[[], Any]) -> float:
    """Of one call, the device's work in it included."""
    sync()
    begin = time.perf_counter()
    function()
    sync()
    return time.perf_counter() - begin


def median_ms(function: Callable[[], Any], seconds: float = 0.5, least: int = 5) -> float:
    """Median of calls for about so many seconds, after two that warm up; by the device's own clock where it has one [ms]."""
    for _ in range(2):
        function()
    took, begin = [], time.perf_counter()
    while len(took) < least or time.perf_counter() - begin < seconds:
        if CUDA:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            function()
            last.record()
            last.synchronize()
            took.append(first.elapsed_time(last))
        else:
            took.append(seconds_of(function) * 1e3)
    return figure(statistics.median(took))


def gemm_tflops(seconds: float = 0.4) -> float:
    """bf16 matrix products of this minute, on random numbers: 8192^3 on a GPU, 256^3 on a CPU [TFLOP/s]."""
    size = 8192 if CUDA else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return figure(2 * size**3 / median_ms(lambda: torch.matmul(a, b, out=out), seconds) / 1e9)


class Energy:
    """What the device has used since it was made [J]."""

    def __init__(self) -> None:
        self.source = "unknown: no GPU"
        self._sampled, self._process = 0.0, None
        self._counter: Callable[[], float] | None = None
        if CUDA and not self._from_nvml():
            self._from_nvidia_smi()

    def joules(self) -> float | None:
        """None where nobody counts them."""
        if self._counter is not None:
            return self._counter()
        return self._sampled if self._process is not None else None

    def close(self) -> None:
        """Stop asking."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _from_nvml(self) -> bool:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid())
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception as error:  # not installed, not allowed, not counted on this card
            self.source = f"unknown: NVML: {error}"
            return False
        self._counter = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        self.source = "NVML energy counter"
        return True

    def _from_nvidia_smi(self) -> None:
        command = [
            "nvidia-smi",
            "-i",
            _uuid(),
            "--query-gpu=power.draw",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            self.source += f"; nvidia-smi: {error}"
            return
        self.source = "nvidia-smi power.draw, sampled five times a second"
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        before = time.monotonic()
        for line in self._process.stdout:
            now = time.monotonic()
            with contextlib.suppress(ValueError):  # "[N/A]"
                self._sampled += float(line) * (now - before)
            before = now


def _uuid() -> str:
    found = str(getattr(torch.cuda.get_device_properties(DEVICE), "uuid", ""))
    return found if found.startswith("GPU-") or not found else f"GPU-{found}"


@contextlib.contextmanager
def group_of_one() -> Iterator[World]:
    """A process group of one on this machine's device."""
    dist.init_process_group(backend(KIND), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield world(KIND)
    finally:
        dist.destroy_process_group()


def laid_out(config: Config, here: World, vocab_size: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model as a run lays it out, with weights drawn on the device, and its optimizer."""
    model = parallelize(skeleton(config.model, vocab_size, None), config.parallel, here)
    draw(model)
    return model, optimizer_of(model, config.optim, may_fuse(config.parallel, here.device))


@torch.no_grad()
def draw(model: nn.Module, seed: int = 0) -> None:
    """Weights as large as a run's first ones, the same for every layout of a model. A run draws its own on one core, 10 s a
    1e9."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in model.parameters():
        here = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if here.dim() < 2:
            here.fill_(1.0)
        else:
            here.normal_(0.0, 0.02, generator=generator)


def random_rows(rows: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Token ids, int64 (rows, length + 1), on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(vocab_size, (rows, length + 1), device=DEVICE, generator=generator)
