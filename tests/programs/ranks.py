"""Real gloo processes, one a rank. A module of its own: what a process is started with is found by its module's name, and
``conftest`` is the name of several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from springtide.distributed import process_group, world

TIMEOUT_S = 180


class RankDied(Exception):
    """A rank ended without a word."""


def meeting_place() -> tuple[TCPStore, dict[str, str]]:
    """The store where ranks meet, on a port that the kernel chose for it, and the environment that says where. A port that is
    looked for first and bound later may be another's by then."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return store, {**where, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is there: rank 0 is not to start one


def _rank(
    rank: int, environment: dict[str, str], results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    try:
        with process_group("cpu"):
            value = pickle.dumps(function(world("cpu"), *arguments))  # by value: this process ends before it is read
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def each(world: Any, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """What each of ``calls``, functions and their arguments after ``world``, returns on this rank. One start of processes is
    enough for all of them, if none leaves its group half-way."""
    return [function(world, *arguments) for function, arguments in calls]


def run_here(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``function(world, *arguments)`` returns on the one rank of a group in this process, which starts no other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(world("cpu"), *arguments, **options)
    finally:
        dist.destroy_process_group()


def forking() -> Any:
    """A server that has imported everything forks the ranks: importing torch and springtide takes longer than most tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks", "preloaded"])
    # Python 3.11's server hears of no sys.path, and passes over in silence what it does not find
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        )
        forkserver.ensure_running()
    return context


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each rank."""
    context = forking()
    results = context.Queue()
    store, where = meeting_place()
    environment = {**os.environ, **where, "WORLD_SIZE": str(world_size)}
    processes = [
        context.Process(target=_rank, args=(rank, environment, results, function, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        num_runs = len(arguments[0]) if arguments and isinstance(arguments[0], list) else 1  # of ``each`` and its like
        deadline = time.monotonic() + TIMEOUT_S * num_runs
        while len(found) < world_size:
            assert time.monotonic() < deadline, f"ranks {set(range(world_size)) - set(found)} said nothing"
            try:
                rank, value, error = results.get(timeout=0.2)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in found]
                if dead:
                    raise RankDied(f"ranks {dead} died") from None
                continue
            assert error is None, f"rank {rank} of {world_size} failed:\n{error}"
            found[rank] = pickle.loads(value)
        for process in processes:
            process.join(TIMEOUT_S)
        return [found[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()  # one that is not gone yet still holds its run
        del store  # not before
