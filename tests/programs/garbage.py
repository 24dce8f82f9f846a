"""Ranks whose collectives return garbage, as NCCL's do when they are aborted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import feed, open_run

from springtide.checkpoint.tensors import local, named_tensors
from springtide.config import Config
from springtide.distributed import Connections, World, abort, collectives, end_group, sum_over_ranks
from springtide.distributed import world as make_world


def _mangled(message: torch.Tensor, how: str, world: World) -> None:
    """``message`` as an aborted all-reduce may leave it."""
    mine = message.clone()
    dist_all_reduce(message)
    if how == "nothing summed":
        message.copy_(mine)
    elif how == "half summed":
        message[len(message) // 2 :] = mine[len(message) // 2 :]
    elif how == "no numbers":
        message.fill_(float("nan"))
    elif how == "one value":
        message[0] = mine[0]
    elif how == "cut off":  # the sums are right: the flag alone tells
        world.aborted.set()


dist_all_reduce = dist.all_reduce


def train_with_garbage(world: World, config: Config, step: int, how: str) -> tuple[str, str, list[int], bool]:
    """Train; the one all-reduce of ``step`` is mangled on every rank. What was raised, the steps that were told, and whether
    weights and moments are those of before that step."""
    world = make_world("cpu")  # one of its own: that it was cut off is said of no later run
    run, told, before = open_run(world, config), [], {}

    def all_reduce(message: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if run.state.step + 1 == step and message.dtype == torch.float64:
            before.update(
                {name: local(one).clone() for name, one in named_tensors(run.state.model, run.state.optimizer).items()}
            )
            return _mangled(message, how, world)
        return dist_all_reduce(message, *arguments, **named)

    dist.all_reduce = all_reduce
    try:
        for event in run.events(feed, lambda: None):
            told += [event.step] if event.kind == "step" else []
        raised: Exception = Exception("nothing")
    except RuntimeError as error:
        raised = error
    finally:
        dist.all_reduce = dist_all_reduce
    same = all(
        torch.equal(local(one), before[name])
        for name, one in named_tensors(run.state.model, run.state.optimizer).items()
    )
    return type(raised).__name__, str(raised), told, same


def evaluate_with_garbage(world: World, config: Config) -> tuple[str, list[str]]:
    """Train; the sum of the held-out losses, three numbers of each of four rows, is mangled. What was raised, and the kinds of
    the events that were told."""
    run, told = open_run(world, config), []

    def all_reduce(message: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return _mangled(message, "half summed", world) if len(message) == 4 * 3 else dist_all_reduce(message)

    dist.all_reduce = all_reduce
    try:
        for event in run.events(feed, lambda: None):
            told.append(event.kind)
    except RuntimeError as error:
        return type(error).__name__, told
    finally:
        dist.all_reduce = dist_all_reduce
    return "", told


def aborted(world: World, folder: str) -> tuple[bool, str, bool, float]:
    """As ``links.cut_off``, in the order of ``let_go`` in a group that torch takes for one of NCCL: whether torch's own abort
    ran, what the waiting collective raised, whether the group is gone, and the sum of a new group of the same processes."""
    links, raised, ran = Connections(), "", False
    collectives._uses_nccl = lambda: True
    if world.rank < world.size - 1:

        def cut() -> None:
            nonlocal ran
            world.aborted.set()
            ran = abort()
            links.cut()

        timer = threading.Timer(0.3, cut)
        timer.start()
        try:
            dist.all_reduce(torch.ones(1000))
        except RuntimeError as error:
            raised = str(error)
        timer.join()
        Path(folder, f"raised-{world.rank}").touch()
    while len(list(Path(folder).iterdir())) < world.size - 1:
        time.sleep(0.02)  # between looks: as long as any waits, the last rank stays away
    end_group(clean=False)
    gone = not dist.is_initialized()
    store = dist.FileStore(f"{folder}-store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    [total] = sum_over_ranks(torch.ones(1), make_world("cpu"))  # with a mesh of its own
    return ran, raised, gone, total
