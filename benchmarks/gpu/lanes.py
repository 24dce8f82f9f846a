"""Two workers against one, with gradients added up in fp64 and micro-batches that cross no lane: are the weights bit-equal?

On CPUs they are. On a GPU two things stand in the way: kernels whose sums come in another order each time (atomics), and the
sum over the workers. Here both worlds are real processes with springtide's own step and layout (ddp, so that a world of two
sums and does nothing else); the two of a world of two share the GPU and talk by gloo, because NCCL refuses two ranks on one
device. A sum of two fp64 numbers is the same by either.

    again       one worker twice: do the kernels agree with themselves?
    two         two workers against one
    price       step time with fp64 sums over that with fp32 sums; with deterministic kernels over that without

``python lanes.py --rank`` is one rank of a world; it reads its cases from its input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import numpy as np
import torch
import torch.distributed as dist
from measure import CUDA, DEVICE, KIND, Book, laid_out, random_rows, seconds_of

from springtide import config as configs
from springtide.config import Config
from springtide.elastic import micro_batches
from springtide.parallel import world
from springtide.train import train_step

LANES, ROWS_PER_LANE, LENGTH, IDS, STEPS = (8, 4, 1024, 8192, 8) if CUDA else (4, 2, 64, 256, 3)


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    as_usual = book.cell("workers/kernels as they come", lambda: worlds(deterministic=False))
    same = "" if CUDA else "needs a GPU: a CPU's kernels are deterministic as they come"
    exact = book.cell("workers/deterministic kernels", lambda: worlds(deterministic=True), same)
    found = []
    if best := exact or as_usual:
        found.append(claims.claim("two_workers_bit_equal_to_one", best["two_bit_equal"], 1, "higher", best))
    if exact and as_usual:
        price = exact["fp64_step_s"] / as_usual["fp32_step_s"]
        found.append(claims.claim("price_of_bit_equality", price, 1.3, "lower", {"usual": as_usual, "exact": exact}))
    return found


def worlds(deterministic: bool) -> dict[str, Any]:
    """A world of one and a world of two on the same cases, compared."""
    told = [
        {"id": "fp64", "reduction": "fp64"},
        {"id": "again", "reduction": "fp64"},
        {"id": "fp32", "reduction": "fp32"},
    ]
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}
    with tempfile.TemporaryDirectory() as folder, _environment(variables | ({} if CUDA else {"OMP_NUM_THREADS": "1"})):
        found = {}
        for workers in (1, 2):
            cases = [case | {"deterministic": deterministic, "to": f"{folder}/{workers}-{case['id']}"} for case in told]
            found[workers] = claims.together(str(Path(__file__).resolve()), cases, workers)
        one, two = found[1], found[2]
        return {
            "again_bit_equal": int(one["fp64"]["digest"] == one["again"]["digest"]),
            "two_bit_equal": int(one["fp64"]["digest"] == two["fp64"]["digest"]),
            "two_losses_equal": int(one["fp64"]["losses"] == two["fp64"]["losses"]),
            "fp32_two_bit_equal": int(one["fp32"]["digest"] == two["fp32"]["digest"]),
            "again_differs_by": differs(folder, "1-fp64", "1-again"),
            "two_differ_by": differs(folder, "1-fp64", "2-fp64"),
            "fp32_two_differ_by": differs(folder, "1-fp32", "2-fp32"),
            "fp64_step_s": one["fp64"]["step_s"],
            "fp32_step_s": one["fp32"]["step_s"],
            "fp64_over_fp32": round(one["fp64"]["step_s"] / one["fp32"]["step_s"], 3),
            "steps": STEPS,
        }


def differs(folder: str, left: str, right: str) -> float:
    """Distance of the weights over their length."""
    a, b = (np.load(f"{folder}/{name}.npy").astype(np.float64) for name in (left, right))
    return float(f"{np.linalg.norm(a - b) / np.linalg.norm(a):.3g}")


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
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


def config_of(reduction: str) -> Config:
    """Blocks of 125M, eager; bf16 on a GPU."""
    changes: dict[str, Any] = {"parallel.reduction": reduction, "parallel.strategy": "ddp", "parallel.compile": False}
    if CUDA:
        return configs.override(configs.recipes.gpu_125m(), changes | {"model.num_layers": 8})
    return configs.override(configs.recipes.tiny(), changes)


def rank() -> None:
    """One rank: every case in turn, its weights to a file."""
    told = json.loads(sys.stdin.read())
    dist.init_process_group("cpu:gloo,cuda:gloo" if CUDA else "gloo")
    for case in told:
        if case["deterministic"]:
            torch.use_deterministic_algorithms(True)
        found = train(case)
        if dist.get_rank() == 0:
            print(json.dumps({"id": case["id"], **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(case: dict[str, Any]) -> dict[str, Any]:
    """A few steps of the same rows, whatever the world."""
    config = config_of(case["reduction"])
    here = world(KIND, 0, config.parallel.shards)
    model, optimizer = laid_out(config, here, IDS)
    mine = LANES // here.size
    parts = micro_batches(
        [ROWS_PER_LANE] * mine, ROWS_PER_LANE, mine, ROWS_PER_LANE, by_lane=case["reduction"] == "fp64"
    )
    losses, times = [], []
    for number in range(STEPS):
        rows = random_rows(LANES * ROWS_PER_LANE, LENGTH, IDS, seed=number)
        first = here.rank * mine * ROWS_PER_LANE
        rows = rows[first : first + mine * ROWS_PER_LANE]

        def step(rows: torch.Tensor = rows) -> None:
            result = train_step(
                model,
                optimizer,
                rows,
                0,
                here,
                micro_batches=parts,
                tokens_per_step=LANES * ROWS_PER_LANE * LENGTH,
                clip_norm=1.0,
            )
            losses.append(result.loss.hex())

        times.append(seconds_of(step))
    weights = [whole(parameter).detach().float().cpu().numpy().ravel() for parameter in model.parameters()]
    flat = np.concatenate(weights)
    if here.is_first:
        np.save(case["to"] + ".npy", flat)
    digest = hashlib.blake2b(flat.tobytes(), digest_size=16).hexdigest()
    return {"digest": digest, "losses": losses, "step_s": round(statistics.median(times[1:]), 4), "device": str(DEVICE)}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, which with ddp is all."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


if __name__ == "__main__":
    rank()
