"""The order of samples: how well it mixes documents, how fast it seeks, and how long verify takes.

order_lag1_*: for each recipe, the lag-1 autocorrelation of the documents that consecutive steps draw from, less that of the
same rows in a random order: 0 mixes as well as drawing rows at random, 1 would train on the same documents twice running. It
is that of step losses, were the loss of a row decided by its document alone. Documents are of lognormal lengths, and one in a
hundred is long, as books and large files are: some third of all tokens. The small recipes read Python's own files.

order_seek_1000_s: seconds until the first batch of step 10,000,000 of a mixture of 1,000 datasets with changing weights, the
order newly made.

order_verify_minutes: of a million steps of 512 rows, from the slope between two shorter runs, whose journals are written here.

    python benchmarks/order.py [--quick] [--json] [--rounds 5] [--steps 2000] [--verified 40000]
"""

from __future__ import annotations

import dataclasses
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import numpy as np

from springtide.config import Config, recipes
from springtide.config.steps import OrderStep, StepsDone
from springtide.dataset import in_process, make_dataset, silent
from springtide.events import Started, StepDone
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import Order, digest, open_data
from springtide.stream.chain import next_chain
from springtide.tracking.journal import Journal

FAR = OrderStep(10_000_000)
MILLION = 1_000_000
SMALL = {"tiny": 1.0, "demo": 3.5}
"""Bytes in a token."""
LAG1_GOAL, SEEK_GOAL_S, VERIFY_GOAL_MINUTES = 0.05, 1.0, 6.0
ZEROS = dict.fromkeys(
    ("loss", "grad_norm", "learning_rate", "step_time_s", "data_wait_s", "tokens_per_s", "mfu", "memory_bytes"), 0
)


def document_lengths(recipe: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of documents in the order in which they are packed, of at least ``tokens`` in all where there are as many."""
    if recipe in SMALL:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        files = [path for path in files if not {"site-packages", "test"} & set(path.parts)]
        sizes = np.array([path.stat().st_size for path in (files[:40] if recipe == "tiny" else files)])
        return rng.permutation((sizes / SMALL[recipe]).astype(np.int64) + 1)
    number = tokens // 1000
    long = rng.random(number) < 0.01
    lengths = np.where(long, rng.lognormal(11, 0.7, number), rng.lognormal(6.5, 1.1, number)).astype(np.int64) + 1
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def lag1(documents: np.ndarray) -> float:
    """The lag-1 autocorrelation of the documents of consecutive steps, int64 (steps, G): of their counts, over all of them."""
    steps, most = len(documents), int(documents.max()) + 1
    found, counts = np.unique(np.arange(steps)[:, None] * most + documents, return_counts=True)
    next_step = np.minimum(np.searchsorted(found, found + most), len(found) - 1)
    again = found[next_step] == found + most
    product = float((counts * counts[next_step])[again].sum())
    squared_mean = float((np.bincount(found % most, counts) ** 2).sum()) / steps
    return (product - squared_mean * (steps - 1) / steps) / (float((counts**2).sum()) - squared_mean)


def mixing(name: str, recipe: Config, steps: int) -> dict[str, Any]:
    """The claim of one recipe, on a corpus of two windows a lane or more, or of Python's files."""
    rng = np.random.default_rng(0)
    length, stream, data = recipe.shards.sequence_length, recipe.stream, recipe.data
    tokens = max(2 * stream.num_lanes * data.window, stream.global_batch * steps) * length
    ends = np.cumsum(document_lengths(name, tokens, rng))
    rows = min(int(ends[-1]) // length, tokens // length)
    steps = min(steps, rows // stream.global_batch)
    group = recipe.shards.rows_per_group
    groups = (group,) * (rows // group) + ((rows % group,) if rows % group else ())
    order = Order((name,), (groups,), 0, stream.global_batch, stream.num_lanes, data.window)
    document_of = np.searchsorted(ends, np.arange(rows) * length, side="right")
    ours = lag1(document_of[np.stack([order.batch(OrderStep(step)).astype(np.int64) for step in range(steps)])])
    drawn = rng.permutation(rows)[: steps * stream.global_batch].reshape(steps, -1)
    random = lag1(document_of[drawn])
    detail = {"ours": round(ours, 5), "random": round(random, 5), "steps": steps, "rows": rows, "window": data.window}
    print(f"{name}: {detail}", flush=True)
    return claims.claim(f"order_lag1_{name}", ours - random, LAG1_GOAL, "lower", detail)


def seek(rounds: int, datasets: int) -> dict[str, Any]:
    """The claim of the seek."""
    rng = np.random.default_rng(0)
    groups = tuple((256,) * int(number) for number in rng.integers(1, 400, datasets))
    weights = tuple((int(start), tuple(rng.random(datasets).tolist())) for start in (0, 10**6, 5 * 10**6))
    order = Order(tuple(map(str, range(datasets))), groups, 0, 1024, 1024, 512, weights)
    seconds, cpu_seconds = [], []
    for _ in range(rounds):
        fresh = dataclasses.replace(order)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        fresh.rank_batch(FAR, 3, 64)
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
    detail = {"datasets": datasets, "step": FAR, "seconds": seconds, "cpu_seconds": cpu_seconds}
    return claims.claim("order_seek_1000_s", statistics.median(seconds), SEEK_GOAL_S, "lower", detail)


def verified(config: Config, steps: int, folder: str) -> tuple[float, float]:
    """Seconds, and CPU seconds, of verify on a run that never trained: its journal and its chain are written here."""
    data, run = open_data(config.data), Run(Folder(folder) / f"{steps}-steps")
    run.write_config(config)
    chain, counted = "", config.tokens_per_step
    with Journal(run.folder) as journal:
        journal(Started(step=StepsDone(0), world_size=1, order_identity=data.order.identity))
        for step in range(steps):
            found = digest(data.order.batch(OrderStep(step)))
            chain = next_chain(chain, OrderStep(step), found, counted, True)
            figures = {"tokens": (step + 1) * counted, "step_tokens": counted, "world_size": 1, "updated": True}
            journal(StepDone(step=StepsDone(step + 1), digest=f"{found:016x}", **figures, **ZEROS))
        journal(Started(step=StepsDone(steps), world_size=1, order_identity=data.order.identity, chain=chain))
    begin, cpu_begin = time.perf_counter(), time.process_time()
    proof = run.verify()
    seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    assert proof.ok
    assert proof.steps_proven_by_chain == steps
    return seconds


def verification(steps: int, rounds: int) -> dict[str, Any]:
    """The claim of verify."""
    with tempfile.TemporaryDirectory() as folder:
        config = recipes.tiny().override({"shards.root": folder, "run.root": folder, "stream.global_batch": 512})
        config = config.override({"shards.dataset": make_dataset(config.corpus, config.shards, silent, in_process)})
        short, long = steps // 4, steps
        slopes = []
        for number in range(rounds):
            seconds = np.array([verified(config, one, f"{folder}/round-{number}") for one in (short, long)])
            slopes.append((seconds[1] - seconds[0]) / (long - short))
    minutes = float(np.median(slopes, axis=0)[0]) * MILLION / 60
    micros = (np.array(slopes).T * 1e6).round().astype(int).tolist()
    detail = {"steps": [short, long], "us_per_step": micros[0], "cpu_us_per_step": micros[1]}
    return claims.claim("order_verify_minutes", minutes, VERIFY_GOAL_MINUTES, "lower", detail)


def main() -> None:
    """Measure, and print the claims."""
    options = claims.options(__doc__, rounds=5, steps=(2000, 20), verified=(40_000, 200))
    found = [mixing(name, recipe(), int(options.steps)) for name, recipe in recipes.RECIPES.items()]
    found.append(seek(options.rounds, 1000))
    found.append(verification(int(options.verified), 1 if options.quick else 3))
    claims.show(options, found)


if __name__ == "__main__":
    main()
