"""The processes of a run and the mesh they form."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_TIMEOUT = timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One axis, ``shard``, over all ranks."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def backend(device_type: str) -> str:
    """The process group backend: gloo for CPU tensors always, NCCL beside it on a GPU."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def world(device_type: str, local_rank: int = 0) -> World:
    """This process in the process group that is already initialised."""
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return World(dist.get_rank(), dist.get_world_size(), device, mesh)


@contextlib.contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """The process group that torchrun's environment describes."""
    dist.init_process_group(backend(device_type), timeout=_TIMEOUT)
    try:
        yield
        # gloo's threads abort a process that leaves while a peer still talks to it
        dist.barrier()
    finally:
        dist.destroy_process_group()
