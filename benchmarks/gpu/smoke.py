"""Does anything run: the tests that know CUDA; then gpu_125m by torchrun on Python's own source, resumed once.

The run prepares its data, trains in bf16, saves while it trains, evaluates and ends; a second process goes on from its
checkpoint. The loss must fall, no step may be skipped, and the resumed run must begin where the first ended.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import claims
import runs
from keys import REPOSITORY
from measure import CUDA, NO_GPU, Book, NotHere

from springtide import config as configs
from springtide.events import Started
from springtide.tracking.journal import last_steps

STEPS, MORE = (20, 5) if CUDA else (8, 2)
FALL = 0.5 if CUDA else 0.05
"""By how much the loss must fall in so few steps [nats]."""


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    tests = book.cell("tests", gpu_tests, NO_GPU, is_timed=False)
    run = book.cell("gpu_125m" if CUDA else "tiny", train, is_timed=False)
    found = []
    if tests:
        found.append(claims.claim("GPU tests that failed", tests["failed"], 0, "lower", tests))
    if run:
        found.append(claims.claim("loss falls by [nats]", run["loss_fell_nats"], FALL, "higher", run))
        found.append(claims.claim("skipped steps", run["skipped_steps"], 0, "lower", run))
    return found


def gpu_tests() -> dict[str, Any]:
    """Run the test files that know CUDA, whole; without conftest, which needs more than is here."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise NotHere("needs pytest (benchmarks/gpu/wheels.py)") from None
    files = sorted(
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests" / "unit").rglob("test_*.py")
        if "torch.cuda.is_available()" in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider"]
    begin = time.monotonic()
    done = subprocess.run([*command, *files], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    found: dict[str, Any] = {"files": len(files), "passed": counts.get("passed", 0), "failed": failed}
    found |= {"skipped": counts.get("skipped", 0), "tests_s": round(time.monotonic() - begin, 1)}
    return found | ({"which": re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)} if failed else {})


def train() -> dict[str, Any]:
    """Train, resume, and return the figures of both."""
    recipe, rows = (configs.recipes.gpu_125m(), 64) if CUDA else (configs.recipes.tiny(), 12)
    more = {"corpus.vocab_size": 4096, "corpus.max_files": 300 if CUDA else 40}
    more |= {"checkpoint.every_steps": STEPS // 2}
    tokens = 4 * recipe.shards.sequence_length
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        config = runs.on_text_at_hand(recipe.override(more), folder, "smoke", rows, STEPS, train__eval_tokens=tokens)
        prepare_s = time.monotonic() - begin
        first_s = runs.torchrun(config, folder)
        first = runs.journal(config)
        longer = config.override({"train.total": (STEPS + MORE) * config.tokens_per_step})
        resumed_s = runs.torchrun(longer, folder, "--accept-changes")
        resumed = runs.journal(config)[len(first) :]
    steps, went_on = last_steps(first), last_steps(resumed)
    began = [event.step for event in resumed if isinstance(event, Started)]
    if began[:1] != [steps[-1].step]:
        raise RuntimeError(f"the resumed run began at {began}, not at {steps[-1].step}")
    return runs.figures(first, STEPS // 2) | {
        "first_loss": round(steps[0].loss, 4),
        "last_loss": round(steps[-1].loss, 4),
        "loss_fell_nats": round(steps[0].loss - steps[-1].loss, 4),
        "resumed_loss": round(went_on[0].loss, 4),
        "skipped_steps": sum(not step.updated for step in [*steps, *went_on]),
        "prepare_s": round(prepare_s, 1),
        "run_s": round(first_s, 1),
        "resume_s": round(resumed_s, 1),
    }
