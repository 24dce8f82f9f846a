"""Ranks that wait for one that does not come, and are cut off."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from springtide.distributed import Connections, World


def cut_off(world: World, folder: str) -> tuple[int, int, str, float]:
    """The last rank does not come to a collective; each of the others cuts itself off from another thread. Its links,
    how many files they opened, what the collective raised, and the sum that a new group of the same processes then has."""
    before = len(os.listdir("/proc/self/fd"))
    links, raised = Connections(), ""
    opened = len(os.listdir("/proc/self/fd")) - before
    count = len(links)
    if world.rank < world.size - 1:
        threading.Timer(0.5, links.cut).start()
        try:
            dist.all_reduce(torch.ones(1000))
        except RuntimeError as error:
            raised = str(error)
        Path(folder, f"raised-{world.rank}").touch()
    while len(list(Path(folder).glob("raised-*"))) < world.size - 1:
        time.sleep(0.02)  # between looks: as long as any waits, the last rank stays away
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=world.rank, world_size=world.size)
    total = torch.ones(1)
    dist.all_reduce(total)
    return count, opened, raised, total.item()
