"""AdamW over the shards of a rank: torch's numbers, without torch's work on distributed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_batch import backward_of_one_batch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from springtide import config as configs
from springtide.checkpoint.tensors import local, materialize
from springtide.config import Config
from springtide.distributed import World
from springtide.distributed.fsdp import parallelize
from springtide.model import skeleton
from springtide.optim.adam import ShardAdamW

TINY = configs.recipes.tiny()


class Distributed(TorchDispatchMode):
    """Names of the operations that get a distributed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, DTensor) for one in tree_leaves((args, kwargs))):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def stepped(
    config: Config, world: World, kind: type[torch.optim.AdamW], **how: Any
) -> tuple[list[torch.Tensor], set[str]]:
    """Weights and moments after two steps, and which operations of the second one had distributed tensors."""
    model = parallelize(skeleton(config.model, 256), config.parallel, world, as_several=True)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, **how)
    materialize(optimizer)
    backward_of_one_batch(model)
    optimizer.step()
    with Distributed() as seen:
        optimizer.step()
    found = [local(one).clone() for one in model.parameters()]
    found += [local(value) for state in optimizer.state.values() for value in state.values()]
    return found, seen.names


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_shards_are_updated_as_torchs_updates_whole_tensors_and_no_operation_is_distributed(
    one: World, how: dict[str, Any]
) -> None:
    ours, seen = stepped(TINY, one, ShardAdamW, **how)
    theirs, distributed = stepped(TINY, one, torch.optim.AdamW, **how)
    assert len(ours) == len(theirs) > 30
    assert all(map(torch.equal, ours, theirs))
    assert not any("adam" in name or "foreach" in name or "lerp" in name for name in seen), seen
    assert any("adam" in name or "foreach" in name or "lerp" in name for name in distributed), "what torch's does"


def test_the_state_is_made_at_once_and_laid_out_as_the_weights(one: World) -> None:
    model = parallelize(skeleton(TINY.model, 256), TINY.parallel, one, as_several=True)
    optimizer = ShardAdamW(model.parameters(), lr=0.01)
    for weight in model.parameters():
        local(weight).detach().fill_(0.5)  # what memory held before may be NaN, which is equal to nothing
    before = [local(one).clone() for one in model.parameters()]
    materialize(optimizer)
    assert all(map(torch.equal, before, map(local, model.parameters())))
    moments = [optimizer.state[one]["exp_avg"] for one in model.parameters()]
    assert all(isinstance(one, DTensor) for one in moments)
    assert [one.shape for one in moments] == [one.shape for one in model.parameters()]
