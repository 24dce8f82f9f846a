"""How preparing and opening grow: requests to the store, bytes read from it, and memory of each task, from S3 to S3.

The text is real, repeated and perturbed: the .rst, .txt and .py below --text, else the Python source of the installed packages.
Each further copy has one word in eight replaced by a word drawn from the text (two copies then share about a third of their
runs of five tokens: they are kept), but one document in fifty has one word in two hundred replaced (a near-duplicate), and one
in a hundred none. It lies as JSON lines files of 64 MB on a real S3 server (SeaweedFS) on this machine, and two processes
prepare it with GPT-2's vocabulary. A prepare is killed (kill -9) in the middle of each of three stages, and ended by a fourth:
its bytes are those of a prepare that nobody killed. A request is a call of obstore or s3fs; of a put in several parts each part
counts. An exponent of 1.0 is linear; it is the largest of any size to the next.

Opening is measured with a made index of row groups: seconds and private memory of a fresh process, its file in the page cache.

    python benchmarks/prepare_growth.py [--quick] [--json] [--sizes 10,100,1000] [--groups 10000000] [--folder F] [--text DIR]
                                        [--store s3://...]

With --folder what is made stays there, and a further call measures what is left: pieces of minutes make a whole of hours. With
--store no server is started: the environment names one, where that folder is empty.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import claims
import numpy as np
import obstore
import s3fs
from prepare import KINDS, gpt2

import springtide as st
from springtide.config import Config, dump, load_config
from springtide.dataset import make_dataset
from springtide.shards import MANIFEST, TRAIN, Manifest, Split, load_manifest, write_manifest
from springtide.shards.shard_table import Columns, ShardTable
from springtide.storage import Folder

GOALS = {
    "exponent_prepare_requests": 1.1,
    "exponent_prepare_bytes_read": 1.1,
    "exponent_prepare_cpu": 1.1,
    "prepare_read_over_text": 4.0,
    "prepare_task_mib": 1024.0,
    "prepare_killed_same_bytes": 1.0,
    "open_s": 1.0,
    "open_private_mib": 100.0,
}
STAGES = ("make_part", "merge", "seal_shards")
"""In which a process is killed."""
FILE_BYTES, PART_BYTES = 64 * 10**6, 8 * 2**20
BASE_MB = 32
"""Text that is not perturbed."""
BUCKET = "s3://shards"
Counts = dict[str, Any]


def write_text(source: str, to: Folder, megabytes: float) -> int:
    """Write the text as JSON lines; return its bytes."""
    texts = list(some_texts(source, min(megabytes, BASE_MB) * 1e6))
    words = np.array([word for text in texts[:400] for word in re.findall(r"\S+", text)])
    left, written, number, lines = megabytes * 1e6, 0, 0, list[bytes]()

    def put() -> None:
        nonlocal lines, number, written
        data = b"".join(lines)
        to.write(f"{number:05d}.jsonl", data)
        written, number, lines = written + len(data), number + 1, []

    held = 0
    for copy in range(10**9):
        rng = np.random.default_rng(copy)
        for text in texts:
            line = json.dumps({"text": perturbed(text, words, rng) if copy else text}).encode() + b"\n"
            lines.append(line)
            held, left = held + len(line), left - len(line)
            if held >= FILE_BYTES or left <= 0:
                put()
                held = 0
            if left <= 0:
                return written
    raise AssertionError


def some_texts(source: str, most: float) -> Iterator[str]:
    """Yield texts of the files below a folder, until there is enough."""
    for folder, folders, names in os.walk(source):
        folders.sort()
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix in KINDS and path.is_file() and 200 < path.stat().st_size < 200_000:
                yield (text := path.read_text("utf-8", "replace"))
                most -= len(text)
                if most <= 0:
                    return


def perturbed(text: str, words: np.ndarray, rng: np.random.Generator) -> str:
    """The text with some of its words replaced."""
    kind = rng.random()
    share = 0.0 if kind < 0.01 else 0.005 if kind < 0.03 else 0.125
    pieces = np.array(re.split(r"(\s+)", text), dtype=object)
    places = np.flatnonzero(rng.random(len(pieces) // 2) < share) * 2
    pieces[places] = words[rng.integers(0, len(words), len(places))]
    return "".join(pieces)


class Store:
    """What this process asks of S3."""

    def __init__(self) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.cpu_s = time.process_time()
        for name in ("get", "get_range", "put", "head", "list"):
            setattr(obstore, name, self._noted(name, getattr(obstore, name)))
        call = s3fs.S3FileSystem._call_s3

        async def noted(fs: Any, method: str, *arguments: Any, **options: Any) -> Any:
            self.requests[method.partition("_")[0]] += 1
            return await call(fs, method, *arguments, **options)

        s3fs.S3FileSystem._call_s3 = noted

    def _noted(self, name: str, of: Any) -> Any:
        def noted(store: Any, path: str, *arguments: Any, **options: Any) -> Any:
            found = of(store, path, *arguments, **options)
            size = found.meta["size"] if name == "get" else len(found) if name == "get_range" else 0
            if name == "put" and isinstance(arguments[0], bytes):
                size = len(arguments[0])
            kind = name.removesuffix("_range")
            self.requests[kind] += 1
            self.bytes[kind] += size
            return found

        return noted

    def taken(self) -> Counts:
        """What was asked since the last call, and the peak of memory since then."""
        cpu_s, self.cpu_s = time.process_time() - self.cpu_s, time.process_time()
        found = {"requests": dict(self.requests), "bytes": dict(self.bytes), "peak_mib": claims.peak_mib()}
        found["cpu_s"] = cpu_s
        self.requests.clear()
        self.bytes.clear()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return found


_store: list[Store] = []


def _begin() -> None:
    _store.append(Store())


def _task(function: Any, item: Any) -> Counts:
    _store[-1].taken()
    function(item)
    return _store[-1].taken()


def prepare(config: Config, log: Path, processes: int) -> None:
    """Prepare a corpus, and note what each task takes in a line of ``log`` when it is done."""
    _store or _begin()

    def note(stage: str, found: Counts) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"stage": stage, **found}) + "\n")

    with contextlib.ExitStack() as open_pools:
        tasks: Any = map
        if processes > 1:
            tasks = open_pools.enter_context(ProcessPoolExecutor(processes, get_context("spawn"), _begin)).map

        def run(function: Any, items: Sequence[Any]) -> Iterator[Any]:
            note("driver", _store[-1].taken())
            for found in tasks(_task, [function] * len(items), items):
                note(function.__name__, found)
                yield None

        make_dataset(config.corpus, config.shards, run=run)
    note("driver", _store[-1].taken())


def child(config: Path, log: Path, kill_in: str) -> None:
    """Run ``prepare`` in processes of its own, which are killed after the first tasks of the stage ``kill_in``, if any."""
    command = [sys.executable, __file__, "--child", str(config), str(log)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        seen = 0
        while process.poll() is None:
            time.sleep(0.05)  # looks at the log; nothing else is waited for
            lines = log.read_text().splitlines() if log.exists() else []
            seen = sum(json.loads(line)["stage"] == kill_in for line in lines) if kill_in else 0
            if kill_in and seen >= KILL_AFTER[kill_in]:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not kill_in and process.returncode:
        raise RuntimeError(f"prepare ended with {process.returncode}")


KILL_AFTER = {"make_part": 2, "merge": 1, "seal_shards": 1}
"""Tasks of a stage that are done when its process is killed: others are under way."""


def total(log: Path) -> Counts:
    """Sums over all tasks, by stage, and the largest memory of a task."""
    stages: dict[str, Counts] = {}
    for line in log.read_text().splitlines():
        found = json.loads(line)
        mine = stages.setdefault(
            found["stage"], {"tasks": 0, "requests": 0, "read_mb": 0.0, "cpu_s": 0.0, "peak_mib": 0.0}
        )
        mine["tasks"] += 1
        mine["requests"] += sum(found["requests"].values()) + found["bytes"].get("put", 0) // PART_BYTES
        mine["read_mb"] += found["bytes"].get("get", 0) / 1e6
        mine["cpu_s"] += found["cpu_s"]
        mine["peak_mib"] = max(mine["peak_mib"], found["peak_mib"])
    whole = {name: sum(one[name] for one in stages.values()) for name in ("requests", "read_mb", "cpu_s")}
    return {**whole, "peak_mib": max(one["peak_mib"] for one in stages.values()), "stages": stages}


def measure(megabytes: float, state: Path, store: str, text: str, quick: bool) -> Counts:
    """What preparing so much text takes, undisturbed and killed three times; from ``state`` if it was measured before."""
    mine = state / f"{megabytes:g}"
    mine.mkdir(exist_ok=True)
    if (mine / "found.json").exists():
        return dict(json.loads((mine / "found.json").read_text()))
    source = Folder(f"{store}/text-{megabytes:g}")
    if not (mine / "text").exists():
        (mine / "text").write_text(str(write_text(text, source, megabytes)))
    size, digests, seconds = int((mine / "text").read_text()), {}, {}
    tokenizer = "bytes" if quick else str(state / "tokenizer.json")
    changes = {"corpus.source": source.url, "corpus.tokenizer": tokenizer, "corpus.max_files": 0}
    changes |= {
        "shards.sequence_length": 64 if quick else 1024,
        "model.max_sequence_length": 1024,
        "shards.heldout_fraction": 0.2 if quick else 0.02,
    }
    for who in ("whole",) if quick else ("whole", "killed"):
        config, log = (
            st.recipes.demo().override({**changes, "shards.root": f"{store}/{who}-{megabytes:g}"}),
            mine / f"{who}.log",
        )
        (mine / f"{who}.yaml").write_text(dump(config))
        begin = time.perf_counter()
        if quick:
            prepare(config, log, 1)
        for stage in STAGES if who == "killed" else ():
            child(mine / f"{who}.yaml", log, stage)
        if not quick:
            child(mine / f"{who}.yaml", log, "")
        seconds[who] = round(time.perf_counter() - begin, 1)
        [name] = Folder(config.shards.root).names()
        digests[who] = load_manifest(Folder(config.shards.root) / name).digest
    found = {"megabytes": size / 1e6, "seconds": seconds, "digests": digests, **total(mine / "whole.log")}
    found["killed"] = total(mine / "killed.log") if "killed" in digests else None
    (mine / "found.json").write_text(json.dumps(found))
    print(json.dumps(found), flush=True)
    return found


def slopes(found: Sequence[Counts], name: str) -> list[float]:
    """The exponent of growth from each size to the next."""
    logs = [(math.log(one["megabytes"]), math.log(one[name])) for one in found]
    return [(y - b) / (x - a) for (a, b), (x, y) in itertools.pairwise(logs)]


def opened(folder: str) -> dict[str, Any]:
    """Seconds and private memory that opening a manifest takes in a fresh process."""
    before, begin = _private_mib(), time.perf_counter()
    manifest = load_manifest(Folder(folder))
    rows = manifest.splits[TRAIN].group_rows()
    return {"seconds": time.perf_counter() - begin, "private_mib": _private_mib() - before, "groups": len(rows)}


def _private_mib() -> float:
    """Memory of this process that no other shares: a mapped file is not in it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def make_index(folder: Path, groups: int) -> None:
    """Write a manifest with this number of row groups: 256 rows of 2,048 ids each, 16 groups in a shard."""
    rows, row_bytes = 256, 2 * 2049
    shards = groups // 16
    begins = np.tile(np.arange(16, dtype=np.int64), shards) * (12 + row_bytes) * rows
    random = np.random.default_rng(0)
    columns = Columns(
        size_bytes=np.full(shards, 16 * (12 + row_bytes) * rows, np.int64),
        digests=random.integers(1, 256, (shards, 16), np.uint8),
        signatures=np.zeros((shards, 16), np.uint8),
        group_ends=np.arange(1, shards + 1, dtype=np.int64) * 16,
        row_ends=np.arange(1, shards * 16 + 1, dtype=np.int64) * rows,
        offsets=np.stack([begins + rows * one for one in (0, 8, 12, 12 + row_bytes)]),
        group_digests=random.integers(1, 256, (shards * 16, 16), np.uint8),
    )
    table = ShardTable([f"train-{number:05d}.parquet" for number in range(shards)], columns)
    counts = {"documents": 1, "tokens": 1, "num_bytes": 1, "rows": shards * 16 * rows}
    facts: dict[str, Any] = {"sequence_length": 2048, "token_type": "uint16", "vocab_size": 300, "end_of_text": 0}
    facts |= {
        "begin_of_text": 0,
        "tokenizer_digest": "0" * 32,
        "fingerprint": "",
        "heldout_fraction": 0.02,
        "source": {},
    }
    split = Split.model_validate({**counts, "shards": table})
    write_manifest(Folder(folder), Manifest.model_validate({**facts, "sources": {"corpus": {TRAIN: split}}}))


def main() -> None:
    """Print the tables and the claims."""
    if sys.argv[1:2] == ["--child"]:
        config = load_config(sys.argv[2])
        prepare(config, Path(sys.argv[3]), 2)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and its clients end
    options = claims.options(__doc__, rounds=1, text="sizes folder text store", groups=(10_000_000, 16_000))
    sizes = [float(one) for one in (options.sizes or ("0.1,0.2" if options.quick else "10,100,1000")).split(",")]
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))
    import s3_server

    with tempfile.TemporaryDirectory() as kept:
        state = Path(options.folder or kept)
        (state / "s3").mkdir(parents=True, exist_ok=True)
        if not options.quick:
            gpt2().save(str(state / "tokenizer.json"))
        with contextlib.nullcontext() if options.store else s3_server.serve(state / "s3"):
            found = [
                measure(
                    size,
                    state,
                    options.store or BUCKET,
                    options.text or sysconfig.get_path("purelib"),
                    options.quick,
                )
                for size in sizes
            ]
        if not (state / "index" / MANIFEST).exists():
            make_index(state / "index", int(options.groups))
        rounds = [opened(str(state / "index"))] if options.quick else []
        rounds += [claims.alone(opened, str(state / "index")) for _ in range(0 if options.quick else 3)]
    exponents = {name: max(slopes(found, name), default=math.nan) for name in ("requests", "read_mb", "cpu_s")}
    same = all(len(set(one["digests"].values())) == 1 for one in found)
    values = {
        "exponent_prepare_requests": exponents["requests"],
        "exponent_prepare_bytes_read": exponents["read_mb"],
        "exponent_prepare_cpu": exponents["cpu_s"],
        "prepare_read_over_text": found[-1]["read_mb"] / found[-1]["megabytes"],
        "prepare_task_mib": max(one["peak_mib"] for one in found),
        "prepare_killed_same_bytes": float(same),
        "open_s": sorted(one["seconds"] for one in rounds)[len(rounds) // 2],
        "open_private_mib": max(one["private_mib"] for one in rounds),
    }
    detail = {"sizes": found, "open": rounds, "cores": os.cpu_count()}
    better = {name: "higher" if name == "prepare_killed_same_bytes" else "lower" for name in GOALS}
    claims.show(options, [claims.claim(name, values[name], goal, better[name], detail) for name, goal in GOALS.items()])


if __name__ == "__main__":
    main()
