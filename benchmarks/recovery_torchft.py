"""torchft as a peer of ``recovery.py``: its lighthouse, three replica groups of a process, and what their logs tell."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import claims
import numpy as np
import psutil
from ports import reserve

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.events import Event, Started, StepDone
from springtide.shards import TRAIN, SplitReader, load_manifest
from springtide.storage import Folder

LIGHTHOUSE = claims.PEERS_PYTHON.with_name("torchft_lighthouse")
LEFT_OUT = "no torchft in .venv-peers: it is left out; `make .venv-peers` brings it"
_SCRIPT = Path(__file__).with_name("recovery_peers.py")
_EVALUATE_EVERY, _HELDOUT = 25, 32
"""Steps between evaluations of the held-out rows, which no gap has in it, and their number."""
_PATIENCE_S = 300.0


class Times(NamedTuple):
    """Time-outs."""

    tick_ms: int
    """Between two looks of the lighthouse at who is there."""
    join_ms: int
    """How long it waits for those whose heart beats and who do not ask for a quorum."""
    dead_ms: int
    """How long after its last heartbeat a replica counts as dead."""
    beat_ms: int
    """Between heartbeats."""
    gloo_s: float
    manager_s: float


DEFAULT = Times(100, 10_000, 5_000, 100, 5.0, 30.0)
"""As its README starts the lighthouse, and its train_ddp.py the manager."""
TUNED = Times(20, 1_000, 1_000, 50, 2.0, 10.0)
"""A time-out that its author thinks fine (meta-pytorch/torchft#35)."""


class Replicas:
    """Nodes that are replica groups of torchft. A context manager."""

    def __init__(self, config: Config, number: int, times: Times) -> None:
        self._folder, self._name, self._number = Path(config.run.root), config.run.id, number
        port = reserve(1)[0]
        flags = {
            "min_replicas": 1,
            "bind": f"127.0.0.1:{port}",
            "quorum_tick_ms": times.tick_ms,
            "join_timeout_ms": times.join_ms,
            "heartbeat_timeout_ms": times.dead_ms,
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        self._lighthouse = psutil.Popen([str(LIGHTHOUSE), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows, heldout = _rows(config, self._folder)
        self._about = {
            "model": config.model.model_dump(),
            "vocabulary": load_manifest(Folder(config.shards.dataset)).vocab_size,
            "rows": rows,
            "heldout": heldout,
            "batch": config.stream.global_batch,
            "replicas": number,
            "lighthouse": f"http://127.0.0.1:{port}",
            "evaluate_every": _EVALUATE_EVERY,
            "heartbeat_ms": times.beat_ms,
            "gloo_s": times.gloo_s,
            "manager_s": times.manager_s,
        }
        self._alive: dict[int, psutil.Popen] = {}

    def __enter__(self) -> Self:
        for _ in range(self._number):
            self.grow()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in [*self._alive.values(), self._lighthouse]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            process.wait()

    def grow(self) -> None:
        """Start the first replica that is not there."""
        replica = min(set(range(self._number)) - self._alive.keys())
        log = _log(self._folder, self._name, replica)
        told = json.dumps(self._about | {"replica": replica, "log": str(log)})
        command = [str(claims.PEERS_PYTHON), str(_SCRIPT), told]
        self._alive[replica] = psutil.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log.with_suffix(".txt").open("a")
        )

    def notice(self) -> None:
        """Ask the last replica to go: it does not train until it must, for nobody would be told."""
        gone = self._alive.pop(max(self._alive))
        gone.send_signal(signal.SIGTERM)
        threading.Thread(target=gone.wait, daemon=True).start()

    def kill(self) -> None:
        """Kill the last replica."""
        gone = self._alive.pop(max(self._alive))
        gone.kill()
        gone.wait()

    def wait(self, steps: int) -> None:
        """Wait until the first has done this number of steps. Raises TimeoutError if it does none for minutes."""
        done, since = 0, time.monotonic()
        while done < steps:
            time.sleep(1.0)  # between looks
            now = max((one["step"] for one in _read(_log(self._folder, self._name, 0))), default=0)
            since = time.monotonic() if now > done else since
            done = now
            if time.monotonic() - since > _PATIENCE_S:
                raise TimeoutError(f"torchft did no step for {_PATIENCE_S:.0f} s after {done} of {steps}")

    def told(self) -> list[Event]:
        """Return what happened as the journal of a run would: the first replica, which is never lost, is asked."""
        return list(_events(_read(_log(self._folder, self._name, 0))))


def _events(tries: list[dict[str, Any]]) -> Iterator[Event]:
    """Return the committed steps; where the quorum, or the number of replicas that count, has changed, a group has started.
    Evaluations are taken out of the time."""
    before, out_s = None, 0.0
    for one in tries:
        if one["committed"]:
            group = one["quorum"], one["workers"]
            done = StepsDone(one["step"])
            if group != before:
                yield Started(step=StepsDone(done - 1), world_size=one["workers"], time_s=one["time_s"] - out_s - 1e-6)
            before = group
            yield StepDone(
                step=done,
                loss=one["loss"],
                grad_norm=0.0,
                learning_rate=0.0,
                tokens=0,
                step_tokens=0,
                step_time_s=one["step_time_s"],
                data_wait_s=0.0,
                tokens_per_s=0.0,
                mfu=0.0,
                memory_bytes=0,
                world_size=one["workers"],
                digest="",
                time_s=one["time_s"],
            )
        out_s = one.get("evaluated_s", 0.0)


def tries(folder: Path, name: str) -> dict[int, list[dict[str, Any]]]:
    """Return replica -> the steps that it tried, of a run of this name."""
    found = {int(path.stem.rpartition("-")[2]): _read(path) for path in folder.glob(f"{name}-replica-*.jsonl")}
    return dict(sorted(found.items()))


def undisturbed(config: Config, number: int, disturbed: Iterable[dict[int, list[dict[str, Any]]]]) -> dict[int, float]:
    """Return step -> held-out loss of a run to which nothing happens, as far as the ``disturbed`` ones came."""
    steps = max(max(_heldout(one), default=0) for one in disturbed)
    with Replicas(config, number, TUNED) as replicas:
        replicas.wait(steps)
        return _heldout(tries(Path(config.run.root), config.run.id))


def changed(
    found: dict[int, list[dict[str, Any]]], alone: dict[int, float], rows: int, replicas: int
) -> dict[str, float]:
    """Return what the model has seen: of the batches of the steps that were done, how many samples were not trained on and how
    many times one was again; and the distance of the held-out loss."""
    steps = max(one["step"] for one in found[0] if one["committed"])
    share = rows // replicas
    seen = Counter(
        (replica, one["batch"]) for replica, mine in found.items() for one in mine if one["committed"] and one["counts"]
    )
    expected = {(replica, batch) for replica in range(replicas) for batch in range(steps)}
    loss = _heldout(found)
    last = max(loss.keys() & alone.keys(), default=None)
    told = {} if last is None else {"loss_off": abs(loss[last] - alone[last])}
    repeated = sum(seen.values()) - len(seen)
    return {
        "samples_lost": float(share * len(expected - seen.keys())),
        "samples_repeated": float(share * repeated),
        **told,
    }


def _heldout(found: dict[int, list[dict[str, Any]]]) -> dict[int, float]:
    return {one["step"]: one["heldout"] for one in found.get(0, []) if "heldout" in one}


def _rows(config: Config, folder: Path) -> tuple[str, str]:
    """Write the rows to train on, those of the dataset, and those that are held out of them; return their files."""
    rows, heldout = folder / "rows.npy", folder / "heldout.npy"
    dataset = Folder(config.shards.dataset)
    manifest = load_manifest(dataset)
    number = manifest.splits[TRAIN].rows
    tokens = SplitReader(dataset, manifest, TRAIN).read(np.arange(min(8192, number))).tokens.astype(np.int64)
    np.save(rows, tokens[:-_HELDOUT])
    np.save(heldout, tokens[-_HELDOUT:])
    return str(rows), str(heldout)


def _log(folder: Path, name: str, replica: int) -> Path:
    return folder / f"{name}-replica-{replica}.jsonl"


def _read(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that may still grow."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
