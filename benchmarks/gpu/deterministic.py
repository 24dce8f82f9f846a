"""Deterministic kernels with fp64 sums, run twice: are the weights bit-equal, and what does that cost a step?

On CPUs they are. On a GPU, kernels whose sums come in another order each time (atomics) prevent it. Each setting of the kernels
is a process of its own, because cuBLAS reads its workspace setting once. The process trains four cases:

    fp64     fp64 sums, a lane at a time
    again    as fp64
    fp32     fp32 sums, a lane at a time
    usual    fp32 sums, the whole batch at once: a step without exactness

``python deterministic.py --rank`` is that process; it reads its cases from its input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import numpy as np
import torch
import torch.distributed as dist
from measure import CUDA, KIND, Book, laid_out, random_rows, sync

from springtide import config as configs
from springtide.config import Config
from springtide.distributed import world
from springtide.training import StepSetup, Work, train_step
from springtide.training.device import choose_kernels
from springtide.training.losses import micro_batches

LANES, ROWS_PER_LANE, LENGTH, IDS, STEPS = (8, 4, 1024, 8192, 8) if CUDA else (4, 2, 64, 256, 3)
PRICE_GOAL = 1.5
CASES = (
    {"id": "fp64", "reduction": "fp64", "rows_at_once": ROWS_PER_LANE},
    {"id": "again", "reduction": "fp64", "rows_at_once": ROWS_PER_LANE},
    {"id": "fp32", "reduction": "fp32", "rows_at_once": ROWS_PER_LANE},
    {"id": "usual", "reduction": "fp32", "rows_at_once": LANES * ROWS_PER_LANE},
)


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    same = "" if CUDA else "needs a GPU: a CPU's kernels are deterministic as they come"
    found = {
        name: book.cell(f"8 layers of 125M, kernels {name}", lambda fixed=fixed: train_twice(fixed), missing)
        for name, fixed, missing in (("as they come", False, ""), ("deterministic", True, same))
    }
    usual, exact = found["as they come"], found["deterministic"] or found["as they come"]
    if not (usual and exact):
        return []
    price = exact["fp64"]["step_s"] / usual["usual"]["step_s"]
    return [
        claims.claim("deterministic runs are bit-equal", exact["bit_equal"], 1, "higher", exact),
        claims.claim("price of bit-equality", price, PRICE_GOAL, "lower", {"usual": usual, "exact": exact}),
    ]


def train_twice(deterministic: bool) -> dict[str, Any]:
    """Train all cases in one process; compare the two that are the same."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [case | {"deterministic": deterministic, "to": f"{folder}/{case['id']}.npy"} for case in CASES]
        with _environment({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}):
            found: dict[str, Any] = claims.together(str(Path(__file__).resolve()), cases, 1)
        one, other = (np.load(f"{folder}/{name}.npy").astype(np.float64) for name in ("fp64", "again"))
    equal = found["fp64"]["digest"] == found["again"]["digest"] and found["fp64"]["losses"] == found["again"]["losses"]
    differs = float(f"{np.linalg.norm(one - other) / np.linalg.norm(one):.3g}")
    return {"bit_equal": int(equal), "weights_differ_by": differs, "steps": STEPS, **found}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    variables = variables if CUDA else variables | {"OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def config_of(reduction: str, deterministic: bool) -> Config:
    """Return 8 blocks of 125M, eager, bf16; tiny on a CPU."""
    changes: dict[str, Any] = {"parallel.reduction": reduction, "parallel.strategy": "ddp", "parallel.compile": False}
    changes["parallel.deterministic"] = deterministic
    if CUDA:
        return configs.recipes.gpu_125m().override(changes | {"model.num_layers": 8})
    return configs.recipes.tiny().override(changes)


def rank() -> None:
    """Train every case in turn, its weights to a file."""
    cases = json.loads(sys.stdin.read())
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    for case in cases:
        print(json.dumps({"id": case["id"], **train(case)}), flush=True)
    dist.destroy_process_group()


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of the same rows."""
    config = config_of(case["reduction"], case["deterministic"])
    choose_kernels(config.parallel)
    here = world(KIND, 0, config.parallel.shards)
    model, optimizer = laid_out(config, here, IDS)
    exact = case["reduction"] == "fp64"
    parts = micro_batches([ROWS_PER_LANE] * LANES, ROWS_PER_LANE, LANES, case["rows_at_once"], by_lane=exact)
    setup, tokens = StepSetup(model, optimizer, here, clip_norm=1.0), LANES * ROWS_PER_LANE * LENGTH
    losses, times = [], []
    for number in range(STEPS):
        rows = random_rows(LANES * ROWS_PER_LANE, LENGTH, IDS, seed=number)
        sync()
        begin = time.perf_counter()
        losses.append(train_step(setup, Work(rows, parts, tokens)).loss.hex())
        sync()
        times.append(time.perf_counter() - begin)
    weights = [local(parameter).detach().float().cpu().numpy().ravel() for parameter in model.parameters()]
    flat = np.concatenate(weights)
    np.save(case["to"], flat)
    digest = hashlib.blake2b(flat.tobytes(), digest_size=16).hexdigest()
    return {"step_s": round(statistics.median(times[1:]), 4), "digest": digest, "losses": losses}


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter: all, in a world of one."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


if __name__ == "__main__":
    rank()
