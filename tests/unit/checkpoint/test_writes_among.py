"""Which of the survivors of a lost group holds which box of its state: each box once, in every layout. No process but this."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from springtide.checkpoint.staging import StagingPlan
from springtide.checkpoint.tensors import Box

Boxes = Counter[tuple[str, Box]]


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def tensors(mesh: DeviceMesh) -> dict[str, Tensor]:
    """A state as DDP and HSDP lay it out: weights of both kinds, one with a shard that is empty, and a count."""
    layouts: list[tuple[str, list[Placement]]] = [
        ("model/sharded", [Replicate(), Shard(0)]),
        ("model/replicated", [Replicate(), Replicate()]),
        ("optim/short", [Replicate(), Shard(0)]),
    ]
    found: dict[str, Tensor] = {}
    for name, layout in layouts:
        rows = 1 if name == "optim/short" else 8
        here, num_shards = mesh.get_local_rank(1), mesh.size(1)
        shard = torch.zeros(rows, 3).chunk(num_shards) if layout[1].is_shard() else [torch.zeros(rows, 3)] * num_shards
        mine = shard[here] if here < len(shard) else torch.zeros(0, 3)
        found[name] = DTensor.from_local(
            mine, mesh, layout, run_check=False, shape=torch.Size([rows, 3]), stride=(3, 1)
        )
    return found | {"optim/count": torch.tensor(3.0), "model/buffer": torch.zeros(2)}


def written(copies: int, shards: int, ranks: tuple[int, ...], among: tuple[int, ...] | None) -> Boxes:
    """The boxes that ``ranks`` write."""
    found: Boxes = Counter()
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=copies * shards)
        mesh = dist.init_device_mesh("cpu", (copies, shards), mesh_dim_names=("replicate", "shard"))
        plan = StagingPlan(rank, copies * shards, among)
        plan.of(tensors(mesh))
        found.update((piece.tensor, Box(piece.offsets, piece.sizes)) for piece in plan.pieces)
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("copies", "shards"), [(4, 1), (2, 2), (3, 2)])
def test_survivors_that_have_every_shard_hold_each_box_of_the_state_once(copies: int, shards: int) -> None:
    everyone = tuple(range(copies * shards))
    whole = written(copies, shards, everyone, None)
    assert set(whole.values()) == {1}
    for number in range(shards, len(everyone)):
        for among in itertools.islice(itertools.combinations(everyone, number), 6):
            have_all = {rank % shards for rank in among} == set(range(shards))
            assert (written(copies, shards, among, among) == whole) is have_all, among
