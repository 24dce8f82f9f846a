"""The world of a worker group: ranks, device mesh, environment variables and process group."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from springtide.distributed.collectives import end_group
from springtide.errors import ConfigError, explain

_TIMEOUT = timedelta(minutes=10)

_NCCL = {
    # Keep NCCL's watchdog from ending the process on a timeout or a peer's error: the driver detects hangs
    # (``ray.train.hang``), and the next worker group reuses the process. _abort_process_group also requires this setting
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # let an abort take up to an hour: after a shorter time, the monitor of NCCL's watchdog would end the process that aborts
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3600",
}
"""Environment variables that ProcessGroupNCCL reads when it is created. Ray Train and torchrun both set
TORCH_NCCL_ASYNC_ERROR_HANDLING to 1."""
_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Environment variables that torch's CUDA allocator reads when it is loaded. A process serves several worker groups in turn,
whose tensors have different sizes. Expandable segments keep GPU memory from fragmenting."""
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables that cuBLAS reads at its first use. With its default workspaces, two equal matrix products may differ
in some bits."""


def gpu_environment(given: Mapping[str, str], deterministic: bool) -> dict[str, str]:
    """Return the environment variables that a process must set before it trains on a GPU. ``given``: the user's environment
    variables, ``elastic.env``. ``deterministic``: True if equal matrix products must give equal bits.

    Examples:
        >>> found = gpu_environment({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, deterministic=True)
        >>> found["PYTORCH_ALLOC_CONF"], found["CUBLAS_WORKSPACE_CONFIG"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        ('backend:cudaMallocAsync', ':4096:8', '0')
    """
    return {**_ALLOCATOR, **(_DETERMINISTIC if deterministic else {}), **given, **_NCCL}


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place in its worker group: rank, number of ranks, device, and device mesh."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Mesh with the axis ``shard`` over all ranks, or with the axes ``replicate`` and ``shard`` if there are several copies of
    the model. None without a process group."""
    aborted: threading.Event = dataclasses.field(default_factory=threading.Event, compare=False)
    """Set when this process is cut off from its worker group, such as after the loss of a rank. From then on, no result of a
    collective may be used."""

    @property
    def copies(self) -> int:
        """Number of copies of the model in the group of ranks; 1 if all ranks share one copy."""
        return self.mesh.size(0) if self.mesh is not None and self.mesh.ndim == 2 else 1

    @property
    def is_first_copy(self) -> bool:
        """Return True on the ranks that share the first copy of the model. Use it to sum over all ranks a value that every copy
        has: only the first copy adds the value. If each copy added its value divided by the number of copies, the sum would be
        inexact unless this number is a power of two."""
        return self.mesh is None or self.copies == 1 or self.mesh.get_local_rank("replicate") == 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def alone(device: torch.device) -> World:
    """Return the world of a single process without a process group."""
    return World(0, 1, device)


def backend(device_type: str) -> str:
    """Return the process group backend: gloo for CPU tensors, plus NCCL for CUDA tensors on a GPU."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def why_no_gpu() -> str:
    """Return the reason why torch finds no GPU, as far as torch reports one: its build, the driver, or CUDA_VISIBLE_DEVICES."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the driver is missing or too old, or a device is lost
        return f"torch {torch.__version__}: {(str(error).splitlines() or ['no reason'])[0][:200]}"
    return "the driver has none, or CUDA_VISIBLE_DEVICES hides them"


def device_index(local_rank: int) -> int:
    """Return the index of the CUDA device that this process uses. It is 0 if the process sees only one device, because its
    launcher has chosen this device (Ray sets CUDA_VISIBLE_DEVICES for each worker). Otherwise it is ``local_rank``.

    Raises: ConfigError if the process sees no device, or too few.
    """
    visible = torch.cuda.device_count()
    if visible == 1:
        return 0
    if not visible:
        limit = f"this process sees no GPU: {why_no_gpu()}"
        remedy = "mend that (springtide doctor says more), or train on CPUs with 0"
        raise ConfigError(explain("elastic.gpus_per_worker", "> 0", limit, remedy))
    if local_rank >= visible:
        limit = f"local rank {local_rank} has no device of its own: this process sees {visible} (CUDA_VISIBLE_DEVICES)"
        raise ConfigError(explain("elastic.gpus_per_worker", "> 0", limit, "start one rank per device on each node"))
    return local_rank


def world(device_type: str, local_rank: int = 0, shards: int = 0, aborted: threading.Event | None = None) -> World:
    """Return this process's world in the initialised process group. ``shards``: number of ranks that share a copy of the model;
    0 means all. ``aborted``: as in ``World``. Raises ConfigError if ``shards`` does not divide the world size."""
    device = torch.device("cuda", device_index(local_rank)) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    size = dist.get_world_size()
    if shards and size % shards:
        raise ConfigError(
            explain("parallel.shard_workers", shards, f"must divide the world size, {size}", "set it to a divisor")
        )
    if shards and shards < size:
        mesh = init_device_mesh(device_type, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    return World(dist.get_rank(), size, device, mesh, aborted or threading.Event())


@contextlib.contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """Join the process group that torchrun's environment describes, for the body of the ``with`` statement. If the body raises,
    abort the group instead of destroying it."""
    dist.init_process_group(backend(device_type), timeout=_TIMEOUT)
    clean = False
    try:
        yield
        # wait for all ranks before leaving: otherwise gloo's threads abort the process while a peer still communicates with it
        dist.barrier()
        clean = True
    finally:
        end_group(clean)
