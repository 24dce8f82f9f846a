"""The work of ``sweep.py``: the same for springtide and the peer; and what they have written down of it."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import springtide as st
from springtide import config as configs
from springtide.config import Config
from springtide.model import build
from springtide.shards import HELDOUT
from springtide.stream import RankReader, open_data
from springtide.training.state import initialize, rate_after
from springtide.tune import name_of, random_points, read, trial_config

RUNGS, REDUCTION = 4, 4
OURS = "springtide"
_LOOK_S = 0.2
_SPACE = {"optim.peak_lr": ("log_uniform", 3e-4, 3e-2), "optim.weight_decay": ("log_uniform", 1e-3, 0.5)}


class Work(NamedTuple):
    """What a client is to do."""

    config: Config
    table: dict[str, Any]
    points: list[dict[str, Any]]
    told: dict[str, Any]
    """The same for the peer."""
    seed: int
    folder: str


class Made(NamedTuple):
    """A step of a trial, as its client has written it down."""

    trial: str
    step: int
    time_s: float
    workers: int


def config_of(root: str, steps: int, slots: int) -> Config:
    """Four layers of 128, a step of about fifty milliseconds on one core."""
    base = configs.recipes.tiny()
    changes = {
        "run.root": f"{root}/runs",
        "shards.root": f"{root}/datasets",
        "model.num_layers": 4,
        "model.dim": 128,
        "model.ffn_dim": 352,
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": slots,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "checkpoint.every_steps": steps // RUNGS,
        "checkpoint.memory_every": 0,  # seconds after a save there is little to lose; nor has the peer one
        "train.total": steps * base.tokens_per_step,
        "optim.warmup": min(10, steps // 4) * base.tokens_per_step,
        "train.eval_tokens": 64 * 64,
        "train.micro_batch": base.stream.global_batch,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return st.prepare(base.override(changes))


def work_of(config: Config, trials: int, seed: int, size: int, root: str) -> Work:
    """The sweep, and what the peer needs to train the same."""
    budget = {
        "trials": trials,
        "tokens_per_trial": config.num_steps * config.tokens_per_step,
        "rungs": RUNGS,
        "reduction": REDUCTION,
    }
    table = {"SPACE": _SPACE, "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"}, "BUDGET": budget}
    points = random_points(read(table, config), config, seed)
    data = Path(root, "data")
    one = trial_config(config, read(table, config).budget, name_of(0), points[0])
    told = {
        "data": str(data),
        "folder": "",
        "model": config.model.model_dump(),
        "vocabulary": _write(config, data),
        **{name: getattr(config.optim, name) for name in ("betas", "eps", "clip_norm", "peak_lr", "weight_decay")},
        "shape": [rate_after(one, step + 1) / one.optim.peak_lr for step in range(one.num_steps)],
        "batch": config.stream.global_batch,
        "steps": one.num_steps,
        "every": one.train.eval_every,
        "size": size,
    }
    return Work(config, table, points, told, seed, root)


def _write(config: Config, folder: Path) -> int:
    """Rows, held-out rows and first weights, as springtide has them; the size of the vocabulary."""
    data = open_data(config.data)
    assert data.eos_id is None, "the peer counts every token"
    if not folder.exists():
        folder.mkdir(parents=True)
        reader = RankReader(data, 0, 1)
        reads = reader.plan(0, config.num_steps, int(config.feed.read_bytes))
        np.save(folder / "rows.npy", np.concatenate([reader.fetch(read).tokens for read in reads]))
        split, rows = data.splits(HELDOUT)[0], data.manifests[0].splits[HELDOUT].rows
        wanted = min(int(config.train.eval_tokens) // data.sequence_length, rows)
        np.save(folder / "heldout.npy", split.read(np.arange(wanted) * rows // wanted).tokens)
        model = build(config.model, data.vocab_size)
        initialize(model, config.model, data.vocab_size)
        torch.save(model.state_dict(), folder / "first.pt")
    return data.vocab_size


def _lines(client: str, work: Work) -> list[tuple[str, dict[str, Any]]]:
    """What every trial has written down so far."""
    ours = client == OURS
    folder = Path(work.config.run.root, "sweep", "trials") if ours else Path(work.folder, "steps")
    found = []
    for file in sorted(folder.glob("*/journal/*.jsonl" if ours else "*.jsonl")):
        trial = file.parts[-3] if ours else file.stem
        for line in file.read_text().splitlines():
            if line.endswith("}"):  # the last may be half written
                found.append((trial, json.loads(line)))
    return found


def steps_made(client: str, work: Work) -> list[Made]:
    """All steps, in the order of their time."""
    lines = [(trial, one) for trial, one in _lines(client, work) if one.get("kind", "step") == "step"]
    made = (Made(trial, one["step"], one["time_s"], one.get("world_size") or one["workers"]) for trial, one in lines)
    return sorted(made, key=lambda one: one.time_s)


def losses(client: str, work: Work) -> list[tuple[float, str, float]]:
    """(time, trial, held-out loss) of each evaluation but the first of all, in the order of time."""
    evaluated = [(trial, one) for trial, one in _lines(client, work) if "heldout_loss" in one and one["step"]]
    return sorted((one.get("evaluated_s", one["time_s"]), trial, one["heldout_loss"]) for trial, one in evaluated)


def asked(client: str, work: Work) -> dict[str, float]:
    """Trial -> when its point was asked for."""
    ours = client == OURS
    folder = Path(work.config.run.root, "sweep", "points") if ours else Path(work.folder, "asked")
    return {file.stem: file.stat().st_mtime for file in folder.glob("*.json")}


Seen = list[tuple[float, float, float]]
"""(time, slots that are held, slots that there are), in order."""


@contextlib.contextmanager
def slots() -> Iterator[Seen]:
    """What is held as time goes by: by Ray's own account, asked in a thread."""
    import ray

    seen, over = Seen(), threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            total, free = ray.cluster_resources().get("CPU", 0.0), ray.available_resources().get("CPU", 0.0)
            seen.append((time.time(), max(0.0, total - free), total))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def seconds(seen: Seen, begin: float, end: float) -> tuple[float, float]:
    """Held in that time, and there were [worker-seconds]."""
    seen = [one for one in seen if begin <= one[0] <= end]
    spans = [after[0] - one[0] for one, after in zip(seen, [*seen[1:], (end, 0.0, 0.0)], strict=True)]
    held, total = (sum(span * one[kind] for span, one in zip(spans, seen, strict=True)) for kind in (1, 2))
    return held, total


def step_s(made: list[Made]) -> float:
    """Worker-seconds of a step, the median."""
    last: dict[str, Made] = {}
    found = []
    for one in made:
        if one.trial in last and one.step == last[one.trial].step + 1:
            found.append((one.time_s - last[one.trial].time_s) * one.workers)
        last[one.trial] = one
    return statistics.median(found) if found else float("nan")


def starts(client: str, work: Work, made: list[Made]) -> dict[str, float]:
    """Seconds from being asked for to the first step, the median over trials: of all, of those that came first, of the others.
    Of ours also until the run's first word and until its first group stands."""
    first: dict[str, float] = {}
    for one in made:
        first.setdefault(one.trial, one.time_s)
    begun = sorted(asked(client, work).items())
    took = [first[trial] - time_s for trial, time_s in begun if trial in first]
    at_once = work.config.elastic.max_workers // (work.told["size"] if client != OURS else 1)
    found = {"start_s": took, "first_start_s": took[:at_once], "later_start_s": took[at_once:]}
    if client == OURS:
        lines = sorted(_lines(client, work), key=lambda line: -float(line[1]["time_s"]))
        word = {trial: one["time_s"] for trial, one in lines}
        stood = {trial: one["time_s"] for trial, one in lines if one["kind"] == "started"}
        found["first_word_s"] = [word[trial] - time_s for trial, time_s in begun if trial in word]
        found["group_s"] = [stood[trial] - time_s for trial, time_s in begun if trial in stood]
    return {name: statistics.median(values) for name, values in found.items() if values}
