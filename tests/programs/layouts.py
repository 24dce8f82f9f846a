"""One state in several layouts: FSDP2, HSDP, a single device. Functions that run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as AlongDim

from springtide.checkpoint import leases
from springtide.checkpoint.async_saver import AsyncSaver
from springtide.checkpoint.format import Meta, committed
from springtide.checkpoint.load import load
from springtide.checkpoint.restore import restore
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import materialize, named_tensors
from springtide.distributed import World
from springtide.storage import Folder, digest

ROWS = 13  # divides by no world size here


class Net(nn.Module):
    """Odd sizes, a buffer, a frozen weight, two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, ROWS)
        self.second = nn.Linear(ROWS, 7, bias=False)
        self.frozen = nn.Parameter(torch.zeros(ROWS, 3), requires_grad=False)
        self.narrow = nn.Parameter(torch.zeros(5, 4, dtype=torch.bfloat16))
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def laid_out(layout: str, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in a layout, with the state of an optimizer that has taken a step of nothing."""
    model = Net()
    if layout != "single":
        mesh = world.mesh
        if layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))

        def columns(parameter: nn.Parameter) -> AlongDim:
            return AlongDim(int(parameter.dim() > 1 and parameter.shape[1] % world.size == 0))

        fully_shard(model, mesh=mesh, shard_placement_fn=columns if layout == "columns" else None)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    materialize(optimizer)
    return model, optimizer


def fill(tensors: dict[str, Tensor]) -> None:
    """Give every element of the whole tensors a number of its own, whatever the layout."""
    for number, (_, tensor) in enumerate(sorted(tensors.items())):
        whole = (
            (torch.arange(tensor.numel(), dtype=torch.float64) + 1000 * number).reshape(tensor.shape).to(tensor.dtype)
        )
        if isinstance(tensor, DTensor):
            from springtide.checkpoint.tensors import box, local

            held = box(tensor)
            cut = tuple(slice(begin, begin + size) for begin, size in zip(held.offsets, held.sizes, strict=True))
            local(tensor).copy_(whole[cut])
        else:
            tensor.copy_(whole)


def save_in(world: World, layout: str, url: str, step: int = 5) -> list[Any]:
    """Save the state in a layout; what this rank's part was."""
    model, optimizer = laid_out(layout, world)
    tensors = named_tensors(model, optimizer)
    with torch.no_grad():
        fill(tensors)
        if step > 5:  # all but what is frozen has changed
            for name, tensor in tensors.items():
                if "frozen" not in name and "table" not in name:
                    tensor.add_(step)
    number = [leases.claim(Folder(url), "o").term if world.is_first else 0]
    dist.broadcast_object_list(number)
    meta = Meta(step=step, tokens=0, world_size=world.size, order_identity="o", config_fingerprint="c")
    with AsyncSaver(
        Folder(url), number[0], world.rank, world.size, stage_in="/dev/shm", tries=2, rule=Rule(2)
    ) as saver:
        saver.begin(tensors, meta, {})
        outcome = saver.poll(wait=True)
        saver.end()  # rank 0's writing process removes what is old after its answer; that belongs to the save, too
    assert outcome
    assert outcome.error is None, outcome.error
    return [outcome.written]


def load_in(world: World, layout: str, url: str) -> dict[str, Tensor]:
    """The whole of every tensor, restored in a layout."""
    model, optimizer = laid_out(layout, world)
    assert restore(Folder(url), model, optimizer, lambda step: "o")
    found = named_tensors(model, optimizer)
    return {name: whole(tensor).clone() for name, tensor in found.items()}


def whole(tensor: Tensor) -> Tensor:
    """Of all ranks' parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_another_model(world: World, url: str) -> str:
    """What is said when the model has other tensors."""
    model = Net()
    del model.second
    model.third = nn.Linear(2, 2)  # type: ignore[assignment]
    model.narrow = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        load(Folder(url), committed(Folder(url))[-1], model, optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _NoMemory(torch.optim.SGD):
    """An optimizer that cannot make its state."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no memory")


def load_on_a_broken_rank(world: World, how: str, url: str) -> str:
    """What is said on a rank when rank 1, alone, hashes wrong ("digest"), lacks the run's storage ("mount") or has no memory
    for its optimizer ("memory")."""
    broken = world.rank == 1
    if broken and how == "digest":
        digest.Running.end = lambda self: "0" * 32  # type: ignore[method-assign]
    folder = Folder(f"{url}/unmounted") if broken and how == "mount" else Folder(url)
    model, optimizer = laid_out("fsdp", world)
    if broken and how == "memory":
        optimizer = _NoMemory(model.parameters())
    try:
        restore(folder, model, optimizer, lambda step: "o", node=f"node-{world.rank}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
