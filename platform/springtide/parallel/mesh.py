"""The processes of a run and the mesh they form."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from springtide.errors import ConfigError, explain

_TIMEOUT = timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """One axis, ``shard``, over all ranks; or ``replicate`` and ``shard``, where there are several copies of the model. A
    process alone, without a process group, has none."""

    @property
    def copies(self) -> int:
        """Of the model."""
        return self.mesh.size(0) if self.mesh is not None and self.mesh.ndim == 2 else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def alone(device: torch.device) -> World:
    """A process that needs no others."""
    return World(0, 1, device)


def backend(device_type: str) -> str:
    """The process group backend: gloo for CPU tensors always, NCCL beside it on a GPU."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def world(device_type: str, local_rank: int = 0, shards: int = 0) -> World:
    """This process in the process group that is already initialised; ``shards`` ranks share a copy of the model, 0 means all.
    ConfigError when they cannot."""
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    size = dist.get_world_size()
    if shards and size % shards:
        raise ConfigError(
            explain("parallel.shard_workers", shards, f"must divide the world size, {size}", "start a multiple of it")
        )
    if shards and shards < size:
        mesh = init_device_mesh(device_type, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    return World(dist.get_rank(), size, device, mesh)


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
