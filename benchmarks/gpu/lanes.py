"""Two workers against one, with gradients added up in fp64 and micro-batches that cross no lane: are the weights bit-equal?

On CPUs they are. On a GPU two things stand in the way: kernels whose sums come in another order each time (atomics), and the
sum over the workers. Here both worlds are real processes with springtide's own step and layout (ddp, so that a world of two
sums and does nothing else); the two of a world of two share the GPU and talk by gloo, because NCCL refuses two ranks on one
device. A sum of two fp64 numbers is the same by either.

    one worker                 twice: do the kernels agree with themselves? and the price: a step with fp64 sums and a lane at a
                               time over one with fp32 sums, and over one with the whole batch at once (large)
    two workers against one    are weights and losses bit-equal?

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
from springtide.dist import world
from springtide.training import train_step
from springtide.training.micro_batches import micro_batches

LANES, ROWS_PER_LANE, LENGTH, IDS, STEPS = (8, 4, 1024, 8192, 8) if CUDA else (4, 2, 64, 256, 3)


CASES = (
    {"id": "fp64", "reduction": "fp64", "rows_at_once": ROWS_PER_LANE},
    {"id": "again", "reduction": "fp64", "rows_at_once": ROWS_PER_LANE},
    {"id": "fp32", "reduction": "fp32", "rows_at_once": ROWS_PER_LANE},
    {"id": "large", "reduction": "fp32", "rows_at_once": LANES * ROWS_PER_LANE},
)


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    same = "" if CUDA else "needs a GPU: a CPU's kernels are deterministic as they come"
    ones, twos = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kernels, missing in {"as they come": "", "deterministic": same}.items():
            fixed = kernels == "deterministic"
            ones[kernels] = book.cell(f"one worker/{kernels}", lambda fixed=fixed: one_worker(folder, fixed), missing)
            if one := ones[kernels]:
                twos[kernels] = book.cell(
                    f"two workers against one/{kernels}",
                    lambda fixed=fixed, one=one: two_workers(folder, fixed, one),
                    missing,
                )
    found = []
    if two := twos.get("deterministic") or twos.get("as they come"):
        found.append(claims.claim("two_workers_bit_equal_to_one", two["bit_equal"], 1, "higher", two))
    usual, exact = ones["as they come"], ones["deterministic"] or ones["as they come"]
    if usual and exact:
        price = exact["fp64_step_s"] / usual["large_step_s"]
        found.append(claims.claim("price_of_bit_equality", price, 1.5, "lower", {"usual": usual, "exact": exact}))
    return found


def one_worker(folder: str, deterministic: bool) -> dict[str, Any]:
    """A world of one on every case: whether it agrees with itself, and the prices."""
    found = worlds(folder, deterministic, 1)
    values: dict[str, Any] = {
        "again_bit_equal": int(found["fp64"]["digest"] == found["again"]["digest"]),
        "again_differs_by": differs(folder, "1-fp64", "1-again"),
    }
    for name in ("fp64", "fp32", "large"):
        values[f"{name}_step_s"] = found[name]["step_s"]
        values[f"{name}_digest"] = found[name]["digest"]
    values["fp64_over_fp32"] = round(values["fp64_step_s"] / values["fp32_step_s"], 3)
    values["fp64_over_large_micro_batch"] = round(values["fp64_step_s"] / values["large_step_s"], 3)
    return values | {"losses": found["fp64"]["losses"], "steps": STEPS}


def two_workers(folder: str, deterministic: bool, one: dict[str, Any]) -> dict[str, Any]:
    """A world of two on the same cases, against what the world of one came to."""
    found = worlds(folder, deterministic, 2)
    return {
        "bit_equal": int(found["fp64"]["digest"] == one["fp64_digest"]),
        "losses_equal": int(found["fp64"]["losses"] == one["losses"]),
        "differ_by": differs(folder, "1-fp64", "2-fp64"),
        "fp32_bit_equal": int(found["fp32"]["digest"] == one["fp32_digest"]),
        "fp32_differ_by": differs(folder, "1-fp32", "2-fp32"),
        "fp64_digest": found["fp64"]["digest"],
    }


def worlds(folder: str, deterministic: bool, workers: int) -> dict[str, dict[str, Any]]:
    """What so many processes come to, by case."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}
    cases = [case | {"deterministic": deterministic, "to": f"{folder}/{workers}-{case['id']}.npy"} for case in CASES]
    with _environment(variables | ({} if CUDA else {"OMP_NUM_THREADS": "1"})):
        return claims.together(str(Path(__file__).resolve()), cases, workers)


def differs(folder: str, left: str, right: str) -> float:
    """Distance of the weights over their length; -1 where one of them is not there."""
    files = [Path(folder) / f"{name}.npy" for name in (left, right)]
    if not all(file.exists() for file in files):
        return -1.0  # the other's cell was measured by a process before this one
    a, b = (np.load(file).astype(np.float64) for file in files)
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
        return configs.recipes.gpu_125m().override(changes | {"model.num_layers": 8})
    return configs.recipes.tiny().override(changes)


def rank() -> None:
    """One rank: every case in turn, its weights to a file."""
    told = json.loads(sys.stdin.read())
    dist.init_process_group("cpu:gloo,cuda:gloo" if CUDA else "gloo")
    for case in told:
        if case["deterministic"]:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # nobody reads it
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
        [ROWS_PER_LANE] * mine, ROWS_PER_LANE, mine, case["rows_at_once"], by_lane=case["reduction"] == "fp64"
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
        np.save(case["to"], flat)
    digest = hashlib.blake2b(flat.tobytes(), digest_size=16).hexdigest()
    return {"digest": digest, "losses": losses, "step_s": round(statistics.median(times[1:]), 4), "device": str(DEVICE)}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, which with ddp is all."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


if __name__ == "__main__":
    rank()
