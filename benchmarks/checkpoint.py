"""Checkpoints: what a save costs training, and how fast state moves, against torch's own and against raw clients.

    stall      time that training waits for a save, against a synchronous save of torch.distributed.checkpoint (DCP) of the same
               state to the same S3 server; step time while the background save runs, against steps without one
    move       our save and load from a quiet process against the best raw put and get of the same bytes by obstore, s3fs and
               s3torchconnector; load from a node's memory against load from S3
    memory     with ``stall``: peak memory of training and writing process over that of training, against the size of the shard

For ``stall`` and ``memory`` one process with one thread trains on a core of its own; the writing process and the S3 server
(SeaweedFS, real) share the rest, as they would beside a GPU. ``move`` leaves every core to everyone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import claims

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))

BLOCK = 16 * 2**20
READERS = 6
PUT = 8 * 2**20, 4
"""Size and number of parts in flight of a put, as ours has them; this server takes larger ones at half the rate."""
TRIES = 3
"""Of each save, load, put and get, of which the best counts: the disk under the server is everybody's."""
STEPS = 8
"""To learn what a step takes."""
ANCHORS = {"8B": 8.03e9, "70B": 70.6e9}
BYTES_PER_PARAMETER = 12
"""fp32 weights and both moments of AdamW."""


def model_of(mib: float) -> Any:
    """A stack of layers whose weights and moments take about ``mib``, and a batch that makes a step of about half a second."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(mib * 2**20 / BYTES_PER_PARAMETER / width**2))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    return model, optimizer, torch.randn(256, width)


def step(model: Any, optimizer: Any, batch: Any, before_update: Any = lambda: None) -> None:
    """Forward, backward, update."""
    model(batch).square().mean().backward()
    before_update()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(function: Any) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def alone_in_a_group() -> None:
    """A process group of one, which DCP wants."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)


def meta(number: int) -> Any:
    """What our checkpoints carry."""
    from springtide.checkpoint.format import Meta

    return Meta(step=number, tokens=0, world_size=1, order_identity="o", config_fingerprint="c")


def saver(url: str) -> Any:
    """Ours, as the loop uses it."""
    from springtide.checkpoint import leases
    from springtide.checkpoint.async_saver import AsyncSaver
    from springtide.checkpoint.retention import Rule
    from springtide.storage import Folder

    number = leases.claim(Folder(url), "benchmark").term
    return AsyncSaver(Folder(url), number, 0, 1, stage_in="/dev/shm", tries=2, rule=Rule(2))


def memory_of(pid: int) -> int:
    """Memory that is this process's own [bytes]: what it shares with others is theirs too, divided."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"Pss:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


class Watch:
    """The peak of a sum of memory, sampled ten times a second."""

    def __init__(self, *pids: int) -> None:
        self.peak = 0
        self._pids, self._over = pids, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self.peak = max(self.peak, sum(memory_of(pid) for pid in self._pids))

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak


def stall(url: str, mib: float, number: int) -> dict[str, float]:
    """One round: step times alone, then with our save beside them; then a synchronous save by DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from springtide.checkpoint.tensors import named_tensors

    first, *rest = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    alone_in_a_group()
    model, optimizer, batch = model_of(mib)
    found: dict[str, float] = {}
    with saver(f"{url}/ours-{number}") as ours:
        ours.start()
        os.sched_setaffinity(ours.state.writer.pid, rest)
        for count in range(2):  # the first makes the stage and starts the process, as the first of a run does
            step(model, optimizer, batch)
            begin = time.perf_counter()
            ours.begin(named_tensors(model, optimizer), meta(count), {})
            waited = time.perf_counter() - begin
            begin = time.perf_counter()
            ours.staged()
            found[f"first_{count}_s"] = waited + time.perf_counter() - begin
            assert ours.poll(wait=True).error is None
        begin = time.perf_counter()
        ours.state.stage.copy(ours._layout.of(named_tensors(model, optimizer)), ours._layout.pieces)
        ours.state.stage.settle()
        found["copy_s"] = time.perf_counter() - begin
        tensors = named_tensors(model, optimizer)
        shard = sum(tensor.nbytes for tensor in tensors.values())
        waits: list[float] = []

        def before_update() -> None:
            begin = time.perf_counter()
            ours.staged()
            waits.append(time.perf_counter() - begin)

        def save_beside_steps(count: int) -> tuple[float, float, list[float]]:
            """Seconds to begin, until it was safe, and of each step beside it."""
            os.sync()  # what is still to be written of the last one costs this one nothing
            begin = time.perf_counter()
            ours.begin(tensors, meta(count), {})
            asked_s, times = time.perf_counter() - begin, []
            while True:
                start = time.perf_counter()
                step(model, optimizer, batch, before_update)
                times.append(time.perf_counter() - start)
                outcome = ours.poll()
                if outcome is not None:
                    assert outcome.error is None, outcome.error
                    return asked_s, time.perf_counter() - begin, times

        alone = [timed(lambda: step(model, optimizer, batch)) for _ in range(STEPS)]
        asked_s, found["background_save_s"], beside = save_beside_steps(10)
        alone += [timed(lambda: step(model, optimizer, batch)) for _ in range(STEPS)]
        found["step_s"] = statistics.median(alone)
        found["wait_s"] = asked_s + waits[0]
        # the copy takes its share of the step that it runs beside: that is stall too
        found["stall_s"] = asked_s + max(waits[0], beside[0] - found["step_s"])
        found["beside_s"] = statistics.median(beside[1:] or beside)
        pids = os.getpid(), ours.state.writer.pid
        # the stage is this process's memory from the first save on, and it is extra: it counts
        before = sum(memory_of(pid) for pid in pids) - ours.state.stage.size_bytes
        watch = Watch(*pids)  # which slows the steps it looks at, so in a save of its own
        save_beside_steps(20)
        found["peak_extra_over_shard"] = (watch.end() - before) / shard
    os.sync()
    # what a bare put of as many bytes beside the steps costs them: the server's share, which a GPU's host does not pay
    floor = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, rest)), sys.executable, __file__, "--put", str(mib)],
        stdout=subprocess.PIPE,
    )
    assert floor.stdout is not None
    floor.stdout.readline()  # it has imported what it needs, and begins
    beside_raw: list[float] = []
    while floor.poll() is None or not beside_raw:
        beside_raw.append(timed(lambda: step(model, optimizer, batch)))
    found["beside_raw_s"] = statistics.median(beside_raw[:-1] or beside_raw)
    os.sync()
    begin = time.perf_counter()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, storage_writer=FsspecWriter(f"{url}/dcp-{number}", sync_files=False))
    found["dcp_s"] = time.perf_counter() - begin
    found["shard_mib"] = shard / 2**20
    return found


def move(url: str, mib: float, number: int) -> dict[str, float]:
    """Seconds of our save and load, to S3 and from memory, with nothing else running."""
    import mmap

    import torch

    from springtide.checkpoint import staging
    from springtide.checkpoint.format import Piece, committed
    from springtide.checkpoint.load import load, read_into
    from springtide.checkpoint.shared_memory import MARK_BYTES
    from springtide.checkpoint.tensors import named_tensors
    from springtide.storage import Folder

    torch.set_num_threads(1)
    model, optimizer, batch = model_of(mib)
    step(model, optimizer, batch)
    tensors = named_tensors(model, optimizer)
    run = Folder(f"{url}/move-{number}")
    found: dict[str, float] = {"bytes": sum(tensor.nbytes for tensor in tensors.values())}
    with saver(run.url) as ours:

        def save(count: int) -> float:
            step(model, optimizer, batch)
            os.sync()
            begin = time.perf_counter()
            ours.begin(tensors, meta(count), {})
            assert ours.poll(wait=True).error is None
            return time.perf_counter() - begin

        found["save_s"] = min(save(count) for count in range(TRIES))
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    os.sync()
    found["load_s"] = min(timed(lambda: load(run, committed(run)[-1], model, optimizer)) for _ in range(TRIES))
    # from memory, as from the server of this node: another process's memory, opened by its descriptor and mapped
    kept, layout = staging.StagingBuffer("/dev/shm", int(found["bytes"])), staging.StagingPlan(0, 1)
    kept.copy(layout.of(tensors), layout.pieces)
    kept.settle()
    pieces = [Piece(*one[:5], "memory", one.begin, one.size_bytes, ()) for one in layout.pieces]
    for tensor in tensors.values():
        tensor.zero_()

    class Vault:
        def __init__(self) -> None:
            fd = os.open(f"/proc/{os.getpid()}/fd/{kept.fd}", os.O_RDONLY)
            self.map = memoryview(mmap.mmap(fd, MARK_BYTES + kept.size_bytes, access=mmap.ACCESS_READ))

        def stream(self, name: str, begin: int, end: int) -> Any:
            yield self.map[MARK_BYTES + begin : MARK_BYTES + end]

        def size(self, name: str) -> int:
            return kept.size_bytes

    begin = time.perf_counter()
    with torch.no_grad():
        read_into(Vault(), pieces, tensors, verify=False)
    found["memory_load_s"] = time.perf_counter() - begin
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    return found


def best_of(put: Any, get: Any) -> dict[str, float]:
    """Seconds of the best of as many tries as ours has."""
    puts = []
    for _ in range(TRIES):
        os.sync()
        puts.append(timed(put))
    os.sync()
    return {"put_s": min(puts), "get_s": min(timed(get) for _ in range(TRIES))}


def in_threads(get: Any, size: int) -> None:
    """Get each part."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
        list(threads.map(get, range(0, size, BLOCK)))


def state_bytes(mib: float) -> memoryview:
    """The very bytes that ours saves."""
    import torch

    from springtide.checkpoint.staging import StagingPlan
    from springtide.checkpoint.tensors import named_tensors, raw

    torch.set_num_threads(1)
    model, optimizer, batch = model_of(mib)
    step(model, optimizer, batch)
    tensors, layout = named_tensors(model, optimizer), StagingPlan(0, 1)
    layout.of(tensors)
    return torch.cat([raw(tensors[piece.tensor]) for piece in layout.pieces]).numpy().data


def raw_obstore(mib: float, get_too: bool = True) -> dict[str, float]:
    """Seconds of one put in parts, and of ranged gets by threads."""
    import numpy as np
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "checkpoints",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region="us-east-1",
        client_options={"allow_http": True, "timeout": datetime.timedelta(minutes=2)},
    )
    data = state_bytes(mib)
    size = len(data)

    def put() -> None:
        obstore.put(store, "raw-obstore", data, chunk_size=PUT[0], max_concurrency=PUT[1])

    if not get_too:
        put()
        return {}
    into = np.zeros(size, dtype=np.uint8)

    def get(start: int) -> None:
        part = obstore.get_range(store, "raw-obstore", start=start, end=min(start + BLOCK, size))
        into[start : start + BLOCK] = np.frombuffer(part, dtype=np.uint8)

    return best_of(put, lambda: in_threads(get, size))


def raw_s3fs(mib: float) -> dict[str, float]:
    """As ``raw_obstore``, with parts of the same size."""
    import numpy as np
    import s3fs

    fs = s3fs.S3FileSystem(use_listings_cache=False)
    data = state_bytes(mib)
    size = len(data)

    def put() -> None:
        with fs.open("checkpoints/raw-s3fs", "wb", block_size=PUT[0]) as file:
            for start in range(0, size, PUT[0]):
                file.write(data[start : start + PUT[0]])

    into = np.zeros(size, dtype=np.uint8)

    def get(start: int) -> None:
        part = fs.cat_file("checkpoints/raw-s3fs", start=start, end=min(start + BLOCK, size))
        into[start : start + BLOCK] = np.frombuffer(part, dtype=np.uint8)

    return best_of(put, lambda: in_threads(get, size))


def raw_s3torchconnector(mib: float) -> dict[str, float]:
    """Its checkpoint reader and writer; nothing where it is not installed."""
    try:
        from s3torchconnector import S3Checkpoint, S3ClientConfig
    except ImportError:
        return {}

    config = S3ClientConfig(force_path_style=True, part_size=PUT[0])
    client = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
    data = state_bytes(mib)
    size = len(data)

    def put() -> None:
        with client.writer("s3://checkpoints/raw-connector") as writer:
            for start in range(0, size, PUT[0]):
                writer.write(data[start : start + PUT[0]])

    def get() -> None:
        with client.reader("s3://checkpoints/raw-connector") as reader:
            reader.read()

    return best_of(put, get)


def main() -> None:
    """Measure, print, claim."""
    if "--put" in sys.argv:
        print("begins", flush=True)
        raw_obstore(float(sys.argv[-1]), get_too=False)
        return
    options = claims.options(__doc__, 4, text="only", mib=(512, 50), largest=(4096, 0))
    import s3_server

    stalls: list[dict[str, float]] = []
    moves: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        server = Path(folder) / "s3"
        server.mkdir()
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(everywhere)[1:])  # which the server's process inherits
        with s3_server.serve(server):
            os.sched_setaffinity(0, everywhere)
            sizes = [options.mib] * options.rounds + ([50, options.largest] if options.largest else [])
            for number, mib in enumerate(sizes):
                if options.only != "move":
                    stalls.append(claims.alone(stall, "s3://checkpoints/stall", mib, number))
                    print("stall", {key: round(value, 4) for key, value in stalls[-1].items()}, flush=True)
                if options.only != "stall":
                    moves.append(one_round(mib, number))
                    print("move", moves[-1], flush=True)
                s3_clear()
    report(options, stalls, moves)


def one_round(mib: float, number: int) -> dict[str, Any]:
    """Ours and each raw client on as many bytes, another one first each round."""
    calls: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("ours", move, ("s3://checkpoints/move", mib, number)),
        *((client.__name__, client, (mib,)) for client in (raw_obstore, raw_s3fs, raw_s3torchconnector)),
    ]
    found: dict[str, Any] = {}
    for name, function, arguments in calls[number % len(calls) :] + calls[: number % len(calls)]:
        os.sync()
        found[name] = claims.alone(function, *arguments)
    return {**found.pop("ours"), **found}


def s3_clear() -> None:
    """Make room for the next round."""
    import fsspec

    fs = fsspec.filesystem("s3", use_listings_cache=False)
    for path in fs.ls("checkpoints"):
        fs.rm(path, recursive=True)


def report(options: argparse.Namespace, stalls: list[dict[str, float]], moves: list[dict[str, Any]]) -> None:
    """Tables and claims; medians over the rounds of the usual size."""
    found: list[dict[str, Any]] = []
    if stalls:
        found += report_stalls(stalls, stalls[: options.rounds])
    if moves:
        found += report_moves(moves, moves[: options.rounds])
    claims.show(options, found)


def report_stalls(stalls: list[dict[str, float]], usual: list[dict[str, float]]) -> list[dict[str, Any]]:
    """The table of ``stall``, what it means for large models, and its claims."""
    heads = ("MiB", "DCP s", "stall s", "share", "step s", "beside s", "ratio", "bare put", "memory")
    print("\n" + " ".join(f"{head:>8}" for head in heads))
    for one in stalls:
        step_s = one["step_s"]
        figures = [
            one["shard_mib"],
            one["dcp_s"],
            one["stall_s"],
            one["stall_s"] / one["dcp_s"],
            step_s,
            one["beside_s"],
        ]
        figures += [one["beside_s"] / step_s, one["beside_raw_s"] / step_s, one["peak_extra_over_shard"]]
        print(" ".join(f"{figure:8.3f}" for figure in figures))
    rate = statistics.median(one["shard_mib"] * 2**20 / one["copy_s"] for one in usual)
    print(
        f"\na copy takes {2**30 / rate:.2f} s a GiB of one core here; it runs beside the next step and stalls what exceeds that"
    )
    for name, parameters in ANCHORS.items():
        size = parameters * BYTES_PER_PARAMETER
        each = [
            f"{size / ranks / 2**30:.1f} GiB, {size / ranks / rate:.2f} s on {ranks} ranks" for ranks in (8, 64, 256)
        ]
        print(f"{name}: {size / 2**30:.0f} GiB of state; a rank copies {'; '.join(each)}")
    shares = [one["stall_s"] / one["dcp_s"] for one in usual]
    slowdowns = [one["beside_s"] / one["step_s"] for one in usual]
    peaks = [one["peak_extra_over_shard"] for one in usual]
    return [
        claims.claim("save_stall_vs_sync", statistics.median(shares), 0.05, "lower", stalls),
        claims.claim("save_step_slowdown", statistics.median(slowdowns), 1.05, "lower", slowdowns),
        claims.claim("save_peak_memory_vs_shard", statistics.median(peaks), 1.1, "lower", peaks),
    ]


def report_moves(moves: list[dict[str, Any]], usual: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table of ``move``, and its claims."""
    clients = ("raw_obstore", "raw_s3fs", "raw_s3torchconnector")
    print("\nMiB/s: ours, " + ", ".join(clients))
    for one in moves:
        mib = one["bytes"] / 2**20

        def rates(kind: str, one: dict[str, Any] = one, mib: float = mib) -> str:
            return " ".join(f"{mib / one[name][kind]:.0f}" if kind in one[name] else "-" for name in clients)

        print(f"{mib:6.0f} save {mib / one['save_s']:.0f} | {rates('put_s')}", end="   ")
        print(f"load {mib / one['load_s']:.0f} | {rates('get_s')}   from memory {mib / one['memory_load_s']:.0f}")

    def against_raw(ours: str, raw: str) -> list[float]:
        """Our bytes a second over the best raw client's."""
        return [min(one[name][raw] for name in clients if raw in one[name]) / one[ours] for one in usual]

    put, get = against_raw("save_s", "put_s"), against_raw("load_s", "get_s")
    tiers = [one["load_s"] / one["memory_load_s"] for one in usual]
    return [
        claims.claim("save_vs_raw_put", statistics.median(put), 0.85, "higher", moves),
        claims.claim("load_vs_raw_get", statistics.median(get), 0.85, "higher", get),
        claims.claim("memory_vs_store_load", statistics.median(tiers), 5.0, "higher", tiers),
    ]


if __name__ == "__main__":
    main()
