"""Tokens/s into a rank, ours against mosaicml-streaming and litdata: the same rows, shuffled, from local disk and from S3.

65,536 rows of 1,025 random ids of a vocabulary of 50,257, batches of 16 rows, one epoch a measurement. Each writes them in
its own format, in files of 64 MiB (ours: row groups of 4 MiB of tokens). "One process" is the loop under torchrun, against
the peers' loaders without workers; "two workers" is the Ray Data feed with two reads in flight, against the peers' loaders
with two worker processes, timed from the first batch of a worker on. Every measurement is a process of its own; who goes
first changes every round; peak memory is that of the process, without its workers. From S3 nothing is on the node before.
Ours checks every batch against the order and every row group against its checksum; the peers check nothing, which is their
default.

Then the time from the start of a process to its first batch, at step 0 and at step 10,000,000; and what a rank that takes a
million tokens/s costs: the share of a core that its process spends, and the share of time that it waits for a batch.

The peers' dependencies and ours exclude each other, so they have a virtual environment of their own: make .venv-peers

    python benchmarks/stream.py [--quick] [--json] [--rounds 5] [--rows 65536]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BEGIN = time.perf_counter()

import claims  # noqa: E402 - the clock above starts first
import numpy as np  # noqa: E402

import springtide as st  # noqa: E402
from springtide.config.data import ShardsConfig  # noqa: E402
from springtide.shards import HELDOUT, TRAIN, Manifest, Split, write_manifest, write_shard  # noqa: E402
from springtide.storage import Folder  # noqa: E402
from springtide.stream import Batch, RankReader, Read, check, load, open_data  # noqa: E402

ROOT = Path(__file__).parent.parent
PEERS_SCRIPT = Path(__file__).with_name("stream_peers.py")
PEERS = ("mosaicml", "litdata")
LEFT_OUT = "no .venv-peers: there is nobody to compare with; `make .venv-peers` brings them"
_TRIES = 3
LENGTH, BATCH = 1024, 16
FAR = 10_000_000
PACE = 1_000_000
"""Tokens/s into a rank, as a fast GPU takes them."""
GOALS = {
    "stream_vs_best_peer_local": 3.5,
    "stream_vs_best_peer_s3": 2.5,
    "first_batch_seek": 1.05,
    "stream_share_of_a_core_at_1m": 0.03,
    "stream_waiting_at_1m": 0.001,
}


def config_of(dataset: str, cache: str) -> st.Config:
    """The demo, on rows of this benchmark."""
    return st.recipes.demo().override(
        {
            "shards.sequence_length": LENGTH,
            "shards.dataset": dataset,
            "shards.rows_per_group": 2048,  # 4 MiB of tokens, as for object storage
            "model.max_sequence_length": LENGTH,
            "stream.global_batch": BATCH,
            "stream.lanes": 0,
            "train.total": "1000B",
            "feed.cache": cache,
            "elastic.max_workers": 1,
        }
    )


def write_ours(rows: np.ndarray, folder: str, config: ShardsConfig | None = None) -> None:
    """Seal ``rows`` as a dataset; the held-out split has one shard of the first of them."""
    dataset, shards, config = Folder(folder), [], config or config_of("", "").shards
    shard_rows = config.rows_per_group * config.groups_per_shard
    for number, first in enumerate(range(0, len(rows), shard_rows)):
        part = rows[first : first + shard_rows]
        shards.append(write_shard(dataset, f"train-{number:05d}.parquet", config, first, np.zeros(len(part)), part))
    split = Split(documents=1, tokens=rows.size, num_bytes=1, rows=len(rows), shards=tuple(shards))
    few = rows[: config.rows_per_group]
    held_out = write_shard(dataset, f"{HELDOUT}-00000.parquet", config, 0, np.zeros(len(few)), few)
    other = Split(documents=1, tokens=few.size, num_bytes=1, rows=len(few), shards=(held_out,))
    ids = {
        "vocab_size": 50_257,
        "end_of_text": 50_256,
        "begin_of_text": 50_256,
        "tokenizer_digest": "0" * 32,
        "fingerprint": "",
        "heldout_fraction": 0.02,
        "source": {},
    }
    manifest = Manifest(
        sequence_length=config.sequence_length,
        token_type="uint16",
        sources={"corpus": {TRAIN: split, HELDOUT: other}},
        **ids,
    )
    write_manifest(dataset, manifest)


def opened(dataset: str, cache: str, first: int, last: int) -> tuple[st.Config, RankReader, list[Read]]:
    """The one rank's reader, and its reads of the steps [first, last)."""
    config = config_of(dataset, cache)
    reader = RankReader(open_data(config.data), 0, 1)
    return config, reader, reader.plan(first, last, int(config.feed.read_bytes))


def read_ours(dataset: str, cache: str, step: int, steps: int, workers: int) -> dict[str, float]:
    """Tokens, seconds and checksum of ``steps`` steps, as the training loop sees them."""
    config, reader, plan = opened(dataset, cache, step, step + steps)

    def checked(batches: Iterator[Batch]) -> Iterator[np.ndarray]:
        for due, batch in enumerate(batches, start=step):
            check(reader.data.order, 0, 1, due, batch)
            yield batch.tokens

    if not workers:
        return claims.read_through(checked(load(reader, plan)), _BEGIN)
    from springtide.ray.cluster.session import cluster
    from springtide.ray.data.feed import feed

    with cluster(config, dashboard=False):
        # the first read is made by this process, as no worker of the peers does: timed from the first batch of a task on
        cold = len(plan[0].steps) + 1
        return claims.read_through(checked(feed(reader, plan, config.feed)), _BEGIN, cold)


def measure(
    who: str, url: str, folder: Path, rows: int, workers: int, step: int = 0, expected: int | None = None
) -> dict[str, Any]:
    """One measurement in a fresh process, with an empty cache; a peer that fails, or reads other rows than those whose first
    tokens add up to ``expected``, may try again."""
    for term in range(_TRIES):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            if who == "ours":
                numbers = map(str, (step, rows // BATCH if not step else 1, workers))
                command = [sys.executable, __file__, "child", url, cache, *numbers]
            else:
                numbers = map(str, (LENGTH + 1, BATCH, workers))
                command = [str(claims.PEERS_PYTHON), str(PEERS_SCRIPT), "read", who, url, *numbers, cache]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        problem = (done.stderr.strip() or "without a word").splitlines()[-1]
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            if expected in (None, found["first_tokens_sum"]):
                return {**found, "failed_tries": term}
            problem = "it has read other rows than were written"
        print(f"{who} failed: {problem}", flush=True)
        if who == "ours":
            break
    raise RuntimeError(f"{who} failed: {problem}: {done.stderr[-2000:]}")


def read_paced(dataset: str, cache: str, seconds: float) -> dict[str, float]:
    """Take ``PACE`` tokens/s for some seconds: the share of a core that this takes, and of the time that is spent waiting."""
    steps = int(seconds * PACE / BATCH / (LENGTH + 1))
    _, reader, plan = opened(dataset, cache, 0, steps + 1)
    order, batches = reader.data.order, load(reader, plan)
    check(order, 0, 1, 0, next(batches))  # what begins once is not counted
    begin, cpu_s, waited_s, longest_s, tokens = time.perf_counter(), time.process_time(), 0.0, 0.0, 0
    for step in range(1, steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        got = time.perf_counter()
        waited_s, longest_s = waited_s + got - asked, max(longest_s, got - asked)
        check(order, 0, 1, step, batch)
        tokens += batch.tokens.size
        time.sleep(max(0.0, begin + tokens / PACE - time.perf_counter()))  # the rank computes meanwhile
    wall_s = time.perf_counter() - begin
    return {
        "share_of_a_core": (time.process_time() - cpu_s) / wall_s,
        "waiting": waited_s / wall_s,
        "longest_wait_s": longest_s,
        "rate": tokens / wall_s,
    }


def compare(
    urls: dict[str, str], folder: Path, rounds: int, rows: int, workers: int, title: str, expected: int
) -> dict[str, Any]:
    """Alternate all for ``rounds`` rounds and print the table; ``expected``: see ``measure``."""
    table: list[dict[str, Any]] = []
    for number in range(rounds):
        names = list(urls)
        row = {
            who: measure(who, urls[who], folder, rows, workers, expected=expected)
            for who in (names[::-1] if number % 2 else names)
        }
        assert {found["tokens"] for found in row.values()} == {rows * (LENGTH + 1)}, row
        # with worker processes, their start is not the feed's
        rates = {
            who: found["warm_rate"] if workers else found["tokens"] / found["seconds"] for who, found in row.items()
        }
        table.append({"rates": rates, "peak_mib": {who: found["peak_mib"] for who, found in row.items()}})
        cells = (f"{who} {rates[who] / 1e6:.1f}M tokens/s, {row[who]['peak_mib']:.0f} MiB" for who in names)
        print(f"{title}, round {number + 1}: {'; '.join(cells)}", flush=True)
    if set(urls) == {"ours"}:
        return {"rounds": table}
    rate = {who: statistics.median(row["rates"][who] for row in table) for who in urls}
    best = max((who for who in urls if who != "ours"), key=lambda who: rate[who])
    ratio = statistics.median(row["rates"]["ours"] / row["rates"][best] for row in table)
    return {"ratio": ratio, "best_peer": best, "rounds": table}


def seek(url: str, folder: Path, tries: int) -> dict[str, Any]:
    """Seconds from process start to the first batch, near and far, alternating."""
    times: dict[int, list[float]] = {0: [], FAR: []}
    for number in range(tries):
        for step in (FAR, 0) if number % 2 else (0, FAR):
            times[step].append(measure("ours", url, folder, BATCH, 0, step)["first_batch_s"])
    near, far = (statistics.median(times[step]) for step in (0, FAR))
    print(f"first batch: {near:.3f} s after the process began at step 0, {far:.3f} s at step {FAR:,}")
    return {"ratio": far / near, "near_s": near, "far_s": far}


def main() -> None:
    """Print the tables and the claims."""
    options = claims.options(__doc__, rounds=5, rows=(65_536, 4096))
    rows, rounds = int(options.rows), int(options.rounds)
    peers = PEERS if claims.PEERS_PYTHON.exists() else ()
    if not (peers or options.quick):
        sys.exit(LEFT_OUT)
    sys.path.append(str(ROOT / "tests" / "programs"))
    import s3_server

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = np.random.default_rng(0).integers(0, 50_257, (rows, LENGTH + 1)).astype(np.uint16)
        np.save(folder / "rows.npy", tokens)
        local = {who: str(folder / who) for who in ("ours", *peers)}
        write_ours(tokens, local["ours"])
        total = int(tokens[:, 0].sum(dtype="int64"))
        del tokens
        for who in peers:
            command = [str(claims.PEERS_PYTHON), str(PEERS_SCRIPT), "write", who, str(folder / "rows.npy"), local[who]]
            subprocess.run(command, check=True, capture_output=True)
        found["local"] = compare(local, folder, rounds, rows, 0, "local, one process", total)
        if not options.quick:
            found["local_workers"] = compare(local, folder, max(1, rounds - 2), rows, 2, "local, two workers", total)
        found["seek"] = seek(local["ours"], folder, 1 if options.quick else 4 * rounds)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            paced = claims.alone(read_paced, local["ours"], cache, 1.0 if options.quick else 20.0)
        print(f"at {PACE:,} tokens/s: {paced}", flush=True)
        found["core"], found["waiting"] = ({**paced, "ratio": paced[name]} for name in ("share_of_a_core", "waiting"))
        (folder / "s3").mkdir()
        with s3_server.serve(folder / "s3"):
            os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]  # mosaicml-streaming's name for it
            remote = {who: f"s3://shards/{who}" for who in local}
            for who, path in local.items():
                Folder(remote[who]).fs.put(f"{path}/", f"shards/{who}/", recursive=True)
            found["s3"] = compare(remote, folder, rounds, rows, 0, "S3, one process", total)
            if not options.quick:
                found["s3_workers"] = compare(remote, folder, max(1, rounds - 2), rows, 2, "S3, two workers", total)
    if not peers:
        found["seek"]["left out"] = LEFT_OUT
    for kind in {"local_workers", "s3_workers"} & found.keys():
        print(f"{kind}: {found[kind]['ratio']:.2f} of {found[kind]['best_peer']}")
    kinds = dict(zip(GOALS, ("local", "s3", "seek", "core", "waiting"), strict=True))
    higher = {"local", "s3"}
    claims.show(
        options,
        [
            claims.claim(name, found[kind]["ratio"], GOALS[name], "higher" if kind in higher else "lower", found[kind])
            for name, kind in kinds.items()
            if "ratio" in found[kind]
        ],
    )


def child() -> None:
    """One measurement of ours, in this process."""
    url, cache, *numbers = sys.argv[2:]
    found = read_ours(url, cache, *map(int, numbers))
    print(json.dumps({**found, "peak_mib": claims.peak_mib()}))


if __name__ == "__main__":
    child() if sys.argv[1:2] == ["child"] else main()
