"""Tokens/s of training: springtide's loop, a bare PyTorch loop, Hugging Face's Trainer, Lightning's.

The same decoder, the same rows of real tokens, the same batch, AdamW and clipping; one process, all its threads, float32 on a
CPU and bfloat16 on a GPU. Everybody has the data in memory or in the page cache; nobody saves or evaluates. Ours reads its
dataset in its order, checks every batch and agrees on every step, as in a run; the peers read an array. Rounds alternate in
one run; who goes first changes. Peers are found in .venv-peers, or said to be missing.

    python benchmarks/throughput.py [--quick] [--json] [--rounds 5] [--steps 30]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import numpy as np
import torch

import springtide as st
from springtide.config import Config
from springtide.distributed import process_group, world
from springtide.events import StepDone
from springtide.shards import TRAIN, SplitReader, load_manifest
from springtide.storage import Folder
from springtide.stream import RankReader, load, open_data
from springtide.training import TrainLoop

HERE = Path(__file__).parent
LEFT_OUT = "no .venv-peers: Hugging Face's Trainer and Lightning are left out; `make .venv-peers` brings them"
WARM_UP_STEPS = 6
GOALS = {"bare_loop": 0.99, "hf_trainer": 1.1, "lightning": 1.0}
SMALL = {"corpus.max_files": 40, "corpus.vocab_size": 512, "model.num_layers": 2, "model.dim": 64, "model.ffn_dim": 176}
"""For --quick."""


def config_of(folder: str, steps: int, small: bool) -> Config:
    """Ten million parameters, of which the head has a good part, as in small models of today."""
    changes = {
        "run.root": f"{folder}/runs",
        "run.id": "throughput",
        "shards.root": f"{folder}/datasets",
        "shards.sequence_length": 256,
        "corpus.tokenizer": "bpe",
        "corpus.vocab_size": 8192,
        "model.num_layers": 6,
        "model.dim": 256,
        "model.num_heads": 8,
        "model.num_kv_heads": 4,
        "model.ffn_dim": 704,
        "stream.global_batch": 8,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "train.micro_batch": 8,
        "train.total": steps * 8 * 256,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "optim.warmup": 0,
        "optim.peak_lr": 1e-3,
        "checkpoint.every_steps": 0,
        "elastic.max_workers": 1,
        "track.progress": False,
    }
    changes |= {"parallel.reduction": "fp32", **(SMALL if small else {})}
    return st.prepare(st.recipes.demo().override(changes))


def ours(config: Config, number: int) -> dict[str, float]:
    """The loop of a run, as under torchrun."""
    store, where = claims.meeting_place()
    os.environ.update(where, RANK="0", WORLD_SIZE="1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with process_group(device):
        data = open_data(config.data)
        run = TrainLoop(config, world(device), data, Folder(config.run.root) / f"run-{number}")

        def feed(reader: RankReader, step: int) -> Any:
            return load(reader, reader.plan(step, config.num_steps, int(config.feed.read_bytes)))

        ends = [time.perf_counter() for event in run.events(feed, lambda: None) if isinstance(event, StepDone)]
    del store
    return _rate(ends, config.tokens_per_step)


def peer(client: str, config: Config, rows: str, steps: int) -> dict[str, float]:
    """Another's, in its own interpreter."""
    python = sys.executable if client == "bare_loop" else str(claims.PEERS_PYTHON)
    told = {"model": config.model.model_dump(), "vocabulary": load_manifest(Folder(config.shards.dataset)).vocab_size}
    told |= {"rows": rows, "batch": config.stream.global_batch, "steps": steps}
    command = [python, str(HERE / "throughput_peers.py"), client, json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{client} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**_rate(found["ends"], config.tokens_per_step), "peak_mib": found["peak_mib"]}


def _rate(ends: list[float], tokens_per_step: int) -> dict[str, float]:
    """Of what followed the warm-up: the median step, which a busy neighbour does not move."""
    times = np.diff(ends)[WARM_UP_STEPS:]
    return {"tokens_per_s": tokens_per_step / float(np.median(times))}


def measure(folder: str, rounds: int, steps: int, small: bool) -> list[dict[str, dict[str, float]]]:
    """Rate and peak memory of each client, by round."""
    config = config_of(folder, steps, small)
    dataset = Folder(config.shards.dataset)
    reader = SplitReader(dataset, load_manifest(dataset), TRAIN)
    rows = f"{folder}/rows.npy"
    np.save(rows, reader.read(np.arange(min(512, load_manifest(dataset).splits[TRAIN].rows))).tokens.astype(np.int64))
    clients = ["springtide", "bare_loop", *(("hf_trainer", "lightning") if claims.PEERS_PYTHON.exists() else ())]
    if not claims.PEERS_PYTHON.exists():
        print(LEFT_OUT)
    found = []
    for number in range(rounds):
        row = {}
        for client in clients if number % 2 == 0 else clients[::-1]:
            row[client] = (
                claims.alone(ours, config, number) if client == "springtide" else peer(client, config, rows, steps)
            )
        found.append(row)
        told = (f"{name} {one['tokens_per_s']:.0f} tokens/s, {one['peak_mib']:.0f} MiB" for name, one in row.items())
        print(f"round {number + 1}: {'; '.join(told)}", flush=True)
    return found


def main() -> None:
    """Print the table and the claims."""
    options = claims.options(__doc__, rounds=5, steps=(30, WARM_UP_STEPS + 4))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(folder, int(options.rounds), int(options.steps), options.quick)
    ratios = {
        name: statistics.median(row["springtide"]["tokens_per_s"] / row[name]["tokens_per_s"] for row in rows)
        for name in rows[0]
        if name != "springtide"
    }
    found = [claims.claim(f"vs_{name}", ratio, GOALS[name], "higher", rows) for name, ratio in ratios.items()]
    detail = ratios if claims.PEERS_PYTHON.exists() else {**ratios, "left out": LEFT_OUT}
    claims.show(options, [*found, claims.claim("vs_best", min(ratios.values()), 1.0, "higher", detail)])


if __name__ == "__main__":
    main()
