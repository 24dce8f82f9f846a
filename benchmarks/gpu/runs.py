"""Whole runs under torchrun, on text that every machine has: for the stages ``smoke`` and ``saves``, and for ``several.py``."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.dataset import make_dataset
from springtide.events import Event, Saved, SaveSkipped
from springtide.storage import Folder
from springtide.tracking.journal import last_steps, read_journal


def on_text_at_hand(recipe: Config, folder: str, name: str, rows: int, steps: int, **changes: Any) -> Config:
    """Return the config of a run of ``steps`` steps on Python's own source; prepare its dataset if it is not there yet.

    Args:
        recipe: the settings that are kept.
        folder: of the run and its dataset.
        name: of the run.
        rows: in a step.
        steps: of the run.
        changes: other settings, by their names with ``__`` for the dot.
    """
    length = recipe.shards.sequence_length
    usual = {
        "run.id": name,
        "run.root": f"{folder}/runs",
        "shards.root": f"{folder}/datasets",
        "corpus.source": "stdlib",
        "corpus.near_duplicates": False,
        "shards.rows_per_group": 64,
        "shards.heldout_fraction": 0.1,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "stream.window": 64 * length,
        "elastic.min_workers": 1,
        "elastic.max_workers": 1,
        "optim.warmup": steps * rows * length // 5,
        "optim.schedule": "cosine",
        "train.total": steps * rows * length,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    config = recipe.override(usual | {key.replace("__", "."): value for key, value in changes.items()})
    return config.override({"shards.dataset": make_dataset(config.corpus, config.shards)})


def torchrun(config: Config, folder: str, *flags: str, processes: int = 1) -> float:
    """Train ``config`` to its end in processes of their own; return how long that took [s]. Raises RuntimeError with the end of
    their output if they fail."""
    file = Path(folder) / f"{config.run.id}.yaml"
    file.write_text(configs.dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "springtide.training", "--config", str(file), *flags]
    environment = os.environ | ({} if config.elastic.gpus_per_worker else {"OMP_NUM_THREADS": "1"})
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with status {done.returncode}: {(done.stdout + done.stderr)[-1400:]}")
    return time.monotonic() - begin


def journal(config: Config) -> list[Event]:
    """Return the events of a run."""
    return read_journal(Folder(config.run.root) / config.run.id)


def figures(events: Sequence[Event], warm_up: int) -> dict[str, Any]:
    """Return the speed and memory of a run, and what its saves cost.

    Args:
        events: of the run.
        warm_up: first steps that do not count; half of the steps if there are fewer than twice as many.
    """
    steps = last_steps(list(events))
    counted = steps[min(warm_up, len(steps) // 2) :]
    saves = [event for event in events if isinstance(event, Saved)]
    found = {
        "steps": len(steps),
        "tokens_per_s": round(statistics.median(step.tokens_per_s for step in counted), 1),
        "mfu": round(statistics.median(step.mfu for step in counted), 4),
        "first_step_s": round(steps[0].step_time_s, 2),
        "step_s": round(statistics.median(step.step_time_s for step in counted), 4),
        "peak_gb": round(max(step.memory_bytes for step in steps) / 1e9, 2),
        "saves": len(saves),
        "skipped_saves": sum(isinstance(event, SaveSkipped) for event in events),
    }
    if saves:
        found |= {
            "state_gb": round(saves[-1].size_bytes / 1e9, 2),
            "stalls_s": [round(one.stall_s, 3) for one in saves],
        }
        found["save_s"] = round(statistics.median(one.save_time_s for one in saves), 2)
        later = saves[1:] or saves  # the first makes the stage and starts the writing process
        found["stall_s"] = round(statistics.median(one.stall_s for one in later), 4)
        found["most_stall_s"] = round(max(one.stall_s for one in saves), 3)
    return found
