"""Does anything run: the GPU tests; then gpu_125m by torchrun on Python's own source, resumed once.

A run prepares its data, trains in bf16 with a profile, saves while it trains, evaluates, ends; a second process goes on from
its checkpoint. The loss must fall, no step may be left out, and the resumed run must begin where the first ended.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
from measure import CUDA, Book, NotHere

from springtide import config as configs
from springtide.config import Config
from springtide.dataset import make_dataset
from springtide.events import Event, Profiled, Saved, Started
from springtide.store import Folder
from springtide.track.journal import last_steps, read_journal

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, MORE = 50, 10
FALL = 1.0
"""By how much the loss must fall in so few steps [nats]."""
WARM_UP = 15
"""Steps that are not counted in the rate: the first ones, and those with the profile."""


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    ours = "" if CUDA else "needs a GPU: on a CPU these tests are the suite's"
    tests = book.cell("tests/unit tests that know CUDA", gpu_tests, ours)
    trained = book.cell(f"run/{'gpu_125m' if CUDA else 'tiny'}", lambda: train(book.quick))
    found = []
    if tests:
        found.append(claims.claim("gpu_tests_failed", tests["failed"], 0, "lower", tests))
    if trained:
        goal = FALL if CUDA else 0.05
        found.append(claims.claim("loss_falls_by_nats", trained["loss_fell_nats"], goal, "higher", trained))
        found.append(claims.claim("steps_left_out", trained["left_out_steps"], 0, "lower", trained))
    return found


def gpu_tests() -> dict[str, Any]:
    """The test files that know CUDA, whole, their checks on a CPU too; without conftest, which needs more than is here."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise NotHere("pytest is not installed; it is among the wheels") from None
    files = sorted(
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests" / "unit").rglob("test_*.py")
        if "torch.cuda.is_available()" in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", *files]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    found: dict[str, Any] = {"files": len(files), "passed": counts.get("passed", 0), "failed": failed}
    found |= {"skipped_for_want_of_a_gpu": counts.get("skipped", 0), "tests_s": round(time.monotonic() - begin, 1)}
    return found | ({"which": re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)} if failed else {})


def config_of(folder: str, quick: bool) -> Config:
    """gpu_125m on what is at hand without a network; tiny on a CPU."""
    recipe, rows = (configs.recipes.gpu_125m(), 64) if CUDA else (configs.recipes.tiny(), 12)
    length = recipe.shards.sequence_length
    steps = STEPS if CUDA else 8
    changes = {
        "run.id": "smoke",
        "run.root": f"{folder}/runs",
        "shards.root": f"{folder}/datasets",
        "corpus.source": "stdlib",
        "corpus.vocab_size": 4096,
        "corpus.max_files": 500 if CUDA else 40,
        "corpus.near_duplicates": False,
        "shards.rows_per_group": 64,
        "shards.heldout_fraction": 0.05 if CUDA else 0.1,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "stream.window": 64 * length,
        "optim.warmup": steps * rows * length // 5,
        "optim.schedule": "cosine",
        "train.total": steps * rows * length,
        "train.eval_tokens": 16 * length,
        "train.profile": 5 if CUDA else 2,
        "checkpoint.every_steps": steps // 2,
    }
    if quick:
        changes["train.eval_tokens"] = 4 * length
    return recipe.override(changes)


def train(quick: bool) -> dict[str, Any]:
    """The figures of the run and of its resume."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder, quick)
        begin = time.monotonic()
        config = config.override({"shards.dataset": make_dataset(config.corpus, config.shards)})
        prepare_s = time.monotonic() - begin
        first_s = torchrun(config, folder)
        run = Folder(config.run.root) / config.run.id
        first = read_journal(run)
        more = MORE if CUDA else 2
        longer = {"train.total": int(config.train.total) + more * config.tokens_per_step}
        resumed_s = torchrun(config.override(longer), folder, "--accept-changes")
        return figures(first, read_journal(run)[len(first) :]) | {
            "prepare_s": round(prepare_s, 1),
            "run_s": round(first_s, 1),
            "resume_s": round(resumed_s, 1),
        }


def torchrun(config: Config, folder: str, *flags: str) -> float:
    """Train ``config`` to its end in a process of its own; how long that took [s]."""
    file = Path(folder) / "config.yaml"
    file.write_text(configs.dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "springtide.training", "--config", str(file), *flags]
    environment = os.environ | ({} if CUDA else {"OMP_NUM_THREADS": "1"})
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with status {done.returncode}: {(done.stdout + done.stderr)[-1400:]}")
    return time.monotonic() - begin


def figures(first: list[Event], resumed: list[Event]) -> dict[str, Any]:
    """What the journals say."""
    steps, went_on = last_steps(first), last_steps(resumed)
    began = [event for event in resumed if isinstance(event, Started)]
    if not began or began[0].step != steps[-1].step:
        raise RuntimeError(f"the resumed run began at {[event.step for event in began]}, not at {steps[-1].step}")
    counted = steps[min(WARM_UP, len(steps) // 2) :]
    found = {
        "steps": len(steps),
        "first_loss": round(steps[0].loss, 4),
        "last_loss": round(steps[-1].loss, 4),
        "loss_fell_nats": round(steps[0].loss - steps[-1].loss, 4),
        "resumed_loss": round(went_on[0].loss, 4),
        "left_out_steps": sum(not step.updated for step in [*steps, *went_on]),
        "tokens_per_s": round(statistics.median(step.tokens_per_s for step in counted), 1),
        "mfu_of_data_sheet": round(statistics.median(step.mfu for step in counted), 4),
        "first_step_s": round(steps[0].step_time_s, 2),
        "step_s": round(statistics.median(step.step_time_s for step in counted), 4),
        "peak_gb": round(max(step.memory_bytes for step in steps) / 1e9, 2),
    }
    for event in first:
        if isinstance(event, Saved):
            found |= {"save_s": round(event.save_time_s, 2), "save_stall_s": round(event.stall_s, 3)}
        if isinstance(event, Profiled):
            found |= {"bound_by": event.bound_by, "shares": str(event.shares), "top": str(event.top)}
    return found
