"""What the benchmarks share: their options, a fresh process a measurement, and how a claim is printed."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PEERS_PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
"""The interpreter of those whose dependencies and ours exclude each other; ``make .venv-peers`` brings it."""


def options(doc: str | None, rounds: int, text: str = "", **numbers: tuple[float, float]) -> argparse.Namespace:
    """--rounds, --quick, --json, options of the names in ``text``, and ``numbers``, each with its value when not quick and
    when quick."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int)
    for name in numbers:
        parser.add_argument(f"--{name}", type=float)
    for name in text.split():
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--quick", action="store_true", help="one small round: a smoke test, no evidence")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args()
    for name, (usual, quick) in {"rounds": (rounds, 1), **numbers}.items():
        if getattr(found, name) is None:
            setattr(found, name, quick if found.quick else usual)
    return found


def claim(name: str, value: float, goal: float, better: str, detail: Any) -> dict[str, Any]:
    """One figure against its goal; ``better`` is higher or lower."""
    holds = value >= goal if better == "higher" else value <= goal
    return {"name": name, "value": round(value, 4), "goal": goal, "better": better, "holds": holds, "detail": detail}


def show(options: argparse.Namespace, claims: Sequence[dict[str, Any]]) -> None:
    """Print the claims, and last, with --json, the line that a program reads."""
    for found in claims:
        state = "met" if found["holds"] else "missed"
        print(f"{found['name']}: {found['value']:.3f}, goal {found['goal']} {state} ({found['better']} is better)")
    if options.quick:
        print("--quick is a smoke test and no evidence")
    if options.json:
        print(json.dumps({"quick": options.quick, "claims": list(claims)}))


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What ``function`` measures in a fresh process, with the peak memory of that process."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(function, arguments, theirs))
    process.start()
    theirs.close()  # the child alone holds that end: if it dies, recv says so
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def _end_with_parent() -> None:
    """However it ended: a cluster that this process has started would go on, and take the machine from who measures next."""
    if parent := mp.parent_process():
        parent.join()
        os._exit(1)


def _child(function: Any, arguments: Any, result: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found = function(*arguments)
    found["peak_mib"] = peak_mib()
    result.send(found)


def together(script: str, told: Sequence[dict[str, Any]], workers: int) -> dict[str, dict[str, Any]]:
    """What a group of ``workers`` processes over loopback finds: each is ``script --rank`` and reads ``told`` from its input;
    rank 0 prints an object with an ``id`` in a line for each thing it has done."""
    store, where = meeting_place()
    environment = {**where, "WORLD_SIZE": str(workers)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, "--rank"],
            env=os.environ | environment | {"RANK": str(number)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(workers)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(list(told)))
        process.stdin.close()
    assert processes[0].stdout is not None
    found = []
    for line in processes[0].stdout:
        if line.startswith("{"):
            found.append(json.loads(line))
            print(line.strip(), file=sys.stderr, flush=True)
    statuses = [process.wait() for process in processes]
    del store  # not before all have ended
    if any(statuses):
        raise RuntimeError("a rank failed")
    return {one.pop("id"): one for one in found}


def meeting_place() -> tuple[Any, dict[str, str]]:
    """The store where the ranks of a process group meet, on a port that the kernel chose for it, and the environment that says
    where. Keep it for as long as they are there."""
    from torch.distributed import TCPStore  # the peers' interpreters may have no torch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, {**where, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is there: rank 0 is not to start one


def read_through(batches: Iterable[Any], began: float, cold: int = 1) -> dict[str, float]:
    """Tokens, seconds and checksum of arrays of token ids (rows, length); ``warm_rate`` is of what followed the first ``cold``
    of them, ``began`` when the process did. Needs no package: the peers' interpreter calls it too."""
    begin = time.perf_counter()
    tokens, total, first, warm, cold_tokens = 0, 0, 0.0, 0.0, 0
    for number, rows in enumerate(batches, 1):
        tokens += rows.size
        total += int(rows[:, 0].sum(dtype="int64"))
        first = first or time.perf_counter()
        if number == cold:
            warm, cold_tokens = time.perf_counter(), tokens
    end = time.perf_counter()
    return {
        "tokens": tokens,
        "seconds": end - begin,
        "first_tokens_sum": total,
        "first_batch_s": first - began,
        "warm_rate": (tokens - cold_tokens) / (end - warm) if warm else 0.0,
    }


def peak_mib() -> float:
    """Peak memory of this process [MiB]; getrusage would count what its parent had when it began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024
