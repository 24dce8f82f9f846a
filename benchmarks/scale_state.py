"""Checkpoints and snapshots at size, for benchmarks/scale.py: real code, a store that counts, ranks that this process plays one
after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from scale_counts import Calls, Cost, cost_of

from springtide.checkpoint import commit as commits
from springtide.checkpoint import leases, snapshots
from springtide.checkpoint import load as loads
from springtide.checkpoint import restore as restores
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import COMMITTED, Meta, StagedPiece, checkpoints, name_of
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.second_reader import BadFileReport
from springtide.checkpoint.shared_memory import HeldAt
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart
from springtide.checkpoint.tensors import Box
from springtide.config.steps import StepsDone
from springtide.storage import Folder, digest

TENSORS = 16
"""Tensors of the state: a real one has some thousands (8B: 873 with its optimizer), which costs as much more, linearly."""
RANKS_A_NODE = 8
WIDTH, PIECE_BYTES = 4, 16


def job_of(run: Folder, ranks: int, rank: int, step: int, keep: int = 9) -> CommitJob:
    """A rank's part of a save: one row of each tensor."""
    meta = Meta(step=StepsDone(step), tokens=step, world_size=ranks, order_identity="o", config_fingerprint="c")
    pieces = [
        StagedPiece(f"model/{name:03d}", "F32", (ranks, WIDTH), (rank, 0), (1, WIDTH), PIECE_BYTES * name, PIECE_BYTES)
        for name in range(TENSORS)
    ]
    return CommitJob(run.url, 1, rank, meta, {}, pieces, Rule(keep), "me")


def view(staged: StagedPiece) -> memoryview:
    """A piece's bytes."""
    return memoryview(bytes(PIECE_BYTES))


def write_parts(run: Folder, ranks: int, step: int) -> None:
    """All ranks but the first write their parts."""
    for rank in range(1, ranks):
        PieceWriter(run).write(job_of(run, ranks, rank, step), view, lambda: False)


def clone(run: Folder, step: int, new: int) -> None:
    """Make a checkpoint of another step out of one."""
    here, there = (Path(run.path) / "checkpoints" / name_of(one) for one in (step, new))
    shutil.copytree(here, there, copy_function=os.link)
    marker = json.loads((there / COMMITTED).read_text())
    manifest = json.loads((there / marker["manifest"]).read_text())
    manifest["meta"]["step"] = new
    data = json.dumps(manifest).encode()
    for name, content in ((marker["manifest"], data), (COMMITTED, b"")):
        (there / name).unlink()
        (there / name).write_bytes(content or json.dumps({**marker, "digest": digest.of_bytes(data)}).encode())


@contextlib.contextmanager
def a_run(ranks: int, step: int = 1) -> Iterator[Folder]:
    """A run with one checkpoint of ``ranks`` ranks, in memory."""
    with tempfile.TemporaryDirectory(prefix="springtide-scale-", dir="/dev/shm") as root:
        run = Folder(root) / "run"
        leases.claim(run, "me")
        write_parts(run, ranks, step)
        PieceWriter(run).write(job_of(run, ranks, 0, step), view, lambda: False)
        yield run


def save(ranks: int, rounds: int) -> Cost:
    """A rank's part of a save, beside three checkpoints that are kept; the calls are those of all ranks."""
    with a_run(ranks) as run:
        for step in (2, 3):
            clone(run, 1, step)
        jobs = iter(range(10, 100))
        found = cost_of(
            lambda: PieceWriter(run).write(job_of(run, ranks, ranks - 1, next(jobs)), view, lambda: False), rounds
        )
    return found._replace(calls=found.calls * ranks)


def commit(ranks: int, rounds: int) -> Cost:
    """Rank 0's commit, when all parts are written."""
    with a_run(ranks) as run:
        folder, job = checkpoints(run), job_of(run, ranks, 0, 2)
        write_parts(run, ranks, 2)
        PieceWriter(run)._part(job, view)

        def prepare() -> None:
            for name in (COMMITTED, "a0001-manifest.json"):
                (Path(folder.path) / job.name / name).unlink(missing_ok=True)

        return cost_of(lambda: commits.commit(run, job, lambda: True), rounds, prepare=prepare)


def retention(ranks: int, rounds: int) -> Cost:
    """The removal of one checkpoint where three are kept."""
    with a_run(ranks) as run:
        for step in (2, 3, 4):
            clone(run, 1, step)

        def prepare() -> None:
            if not (Path(run.path) / "checkpoints" / name_of(1)).exists():
                clone(run, 4, 1)

        return cost_of(lambda: commits.tidy(run, job_of(run, ranks, 0, 4, keep=3)), rounds, prepare=prepare)


def restore(ranks: int, rounds: int) -> Cost:
    """A rank's part of a restore; the calls are those of all ranks."""
    rank = ranks - 1
    with a_run(ranks) as run, contextlib.ExitStack() as patches:
        name = name_of(1)
        manifest = restores.read_manifest(run, name)
        others = [PieceTable.of(loads.read_pieces(run, name, manifest, [index])) for index in manifest.indexes]
        told = sum(len(pickle.dumps(one)) for one in others)

        def gathered(value: Any) -> list[Any]:
            """What all ranks say: how many they are, what each has read, whether it is good."""
            if value is None or isinstance(value[0], BadFileReport):
                return [value] * ranks
            (report, _), fatal = value
            return [((report, one), fatal) for one in others]

        def fill(_run: Folder, _name: str, *_: Any, table: PieceTable, **__: Any) -> None:
            wanted = {f"model/{number:03d}": Box((rank, 0), (1, WIDTH)) for number in range(TENSORS)}
            found = loads.by_tensor(table.overlapping(wanted)).items()
            into = {name: torch.empty(1, WIDTH) for name in wanted}
            copies = [copy for name, some in found for copy in loads._copies(some, into[name], wanted[name])]
            loads._read_all(checkpoints(run), copies, verify=True)

        for target, stand_in in (("gathered", gathered), ("load", fill), ("rank_here", lambda: rank)):
            patches.enter_context(mock.patch.object(restores, target, stand_in))

        def again() -> None:
            found, problem = restores._try_load(run, name, None, SimpleNamespace(), None)  # type: ignore[arg-type]
            assert found is not None, problem

        found = cost_of(again, rounds)
    # rank 0 asks six times more, and for each page of the listing
    return found._replace(calls=found.calls * ranks, bytes=found.bytes + told, peak_bytes=found.peak_bytes + told)


def snapshot(ranks: int, rank: int, step: int, slot: int = 0) -> Snapshot:
    """A rank's part of a snapshot."""
    job = job_of(Folder("/x"), ranks, rank, step)
    return Snapshot.of(1, rank, job.meta, job.pieces, PIECE_BYTES * TENSORS, [("0" * 32,)] * TENSORS, slot=slot)


def pieces(ranks: int, rounds: int) -> Cost:
    """A rank's part of a restore from memory, after the look-up and before the bytes: it asks the holders of its share of the
    parts for their pieces, and hears those of all; the calls are those of all ranks."""
    from springtide.ray.train import snapshot_client

    rank = ranks - 1
    taken = [snapshot(ranks, one, 9) for one in range(ranks)]
    tables = {one.key: pickle.dumps(one.table) for one in taken}
    others = [one.table for one in taken]
    told = sum(map(len, tables.values()))
    ask = Calls(told)
    place = HeldAt("node", 1, 3)
    parts = [dataclasses.replace(one.part, held_at=(place,)) for one in taken]

    def gathered(value: Any) -> list[Any]:
        return [("", one) for one in others] if isinstance(value, tuple) else [value] * ranks

    def fill(source: Any, table: PieceTable, *_: Any) -> None:
        wanted = {f"model/{number:03d}": Box((rank, 0), (1, WIDTH)) for number in range(TENSORS)}
        assert {one.offsets[0] for one in table.overlapping(wanted)} <= {0, rank}

    server = SimpleNamespace(pieces=SimpleNamespace(remote=lambda keys: tuple(ask(keys))))
    ray = SimpleNamespace(
        get_actor=lambda *_, **__: server,
        get=lambda keys, timeout: [pickle.loads(tables[key]) for key in keys],
    )
    client = snapshot_client.SnapshotClient.__new__(snapshot_client.SnapshotClient)
    client._prefix, client._excluded, client.node = "run-", set(), "another"
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(snapshot_client, "ray", ray))
        patches.enter_context(mock.patch.object(snapshot_client, "answers", lambda asked, *_: set(asked)))
        for name, stand_in in (
            ("gathered", gathered),
            ("rank_here", lambda: rank),
            ("_newest", lambda *_: parts),
            ("_fill", fill),
        ):
            patches.enter_context(mock.patch.object(snapshots, name, stand_in))

        def again() -> None:
            assert snapshots.restore_from_snapshots(Folder("/x"), client, None, None, None)  # type: ignore[arg-type]

        found = cost_of(again, rounds, ask.spent)
    return found._replace(calls=found.calls * ranks, peak_bytes=found.peak_bytes + told)


def lookup(ranks: int, rounds: int) -> Cost:
    """What rank 0 asks, before a restore from memory: the calls to Ray's control store and to the servers. None answers within
    0.05 s, so the nodes are tried."""
    from springtide.ray.cluster import nodes
    from springtide.ray.train import snapshot_client, snapshot_lookup

    number = max(1, ranks // RANKS_A_NODE)
    names = [f"{one:056x}" for one in range(number)]

    def held(node: int) -> list[tuple[SnapshotPart, int]]:
        """Two stages of each of its ranks, and of those of another node."""
        return [
            (snapshot(ranks, rank, step, slot).part, 3)
            for of in (node, (node + 1) % number)
            for rank in range(of * RANKS_A_NODE, min(ranks, (of + 1) * RANKS_A_NODE))
            for slot, step in enumerate((8, 9))
        ]

    answers = [pickle.dumps(((name, 1), held(place))) for place, name in enumerate(names)]

    call = Calls(sum(map(len, answers)))

    class Server:
        def __init__(self, place: int) -> None:
            self.place, self._actor_id = place, place.to_bytes(8, "big")
            self.found = SimpleNamespace(remote=lambda: call((place,)))
            self.forget = SimpleNamespace(remote=lambda *_: call(-1))

    servers = {name: Server(place) for place, name in enumerate(names)}
    table = [{"NodeID": name, "Alive": True, "NodeManagerAddress": "", "NodeManagerPort": 1} for name in names]
    alive = {
        one._actor_id.hex(): {"State": "ALIVE", "Address": {"NodeID": names[one.place]}} for one in servers.values()
    }
    waits = 0

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        nonlocal waits
        waits += 1
        return ([], refs) if waits % 2 else (refs, [])

    ray = SimpleNamespace(
        util=SimpleNamespace(
            list_named_actors=lambda all_namespaces: call(
                [{"namespace": snapshot_lookup.NAMESPACE, "name": f"run-{name}"} for name in names]
            )
        ),
        get_actor=lambda name, namespace: call(servers[name.removeprefix("run-")]),
        wait=wait,
        get=lambda ref: pickle.loads(answers[ref[0]]),
        nodes=lambda: call(table),
        exceptions=snapshot_lookup.ray.exceptions,
    )
    state = SimpleNamespace(
        actor_table=lambda one, *_: call(alive if one is None else alive[one]), get_draining_nodes=dict
    )
    client = snapshot_client.SnapshotClient.__new__(snapshot_client.SnapshotClient)
    client._prefix = "run-"

    with contextlib.ExitStack() as patches:
        for module, name, stand_in in (
            (snapshot_lookup, "ray", ray),
            (nodes, "ray", ray),
            (nodes, "state", state),
            (nodes, "_connect", lambda addresses, timeout_s: dict.fromkeys(addresses, 0)),
            (snapshot_client, "staying", lambda: call(names)),
        ):
            patches.enter_context(mock.patch.object(module, name, stand_in))

        def again() -> None:
            assert len(client.found()) == 2 * ranks
            client.forget(9)

        return cost_of(again, rounds, call.spent)
