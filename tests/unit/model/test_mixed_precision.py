"""A process that trains alone converts weights where they are used: it computes what FSDP computes, without FSDP."""

from __future__ import annotations

import pytest
import torch
from one_batch import backward_of_one_batch
from torch import Tensor

from springtide import config as configs
from springtide.checkpoint.tensors import local, plain_name
from springtide.config import Config
from springtide.distributed import World, fsdp
from springtide.distributed.fsdp import parallelize
from springtide.model import skeleton


def gradients(config: Config, one: World, sharded: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch, and the gradients, fp32."""
    model = skeleton(config.model, 256)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.model.adapter == "none" or ".lora_" in name or name.endswith("magnitude"))
    if sharded:
        fsdp._shard(model, model.blocks, config.parallel, one)
        model.place(one.device)
    else:
        parallelize(model, config.parallel, one)
    loss = backward_of_one_batch(model)
    named = {plain_name(name): parameter.grad for name, parameter in model.named_parameters()}
    return loss, {name: local(grad) for name, grad in named.items() if grad is not None}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("adapter", ["none", "lora", "dora"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_the_bits_of_fsdp(precision: str, adapter: str, tied: bool, one: World) -> None:
    changes = {"parallel.precision": precision, "model.adapter": adapter, "model.tied_head": tied}
    config = configs.recipes.tiny().override(changes | {"model.qkv_bias": True, "model.qk_norm": "head"})
    (loss, found), (expected_loss, expected) = (gradients(config, one, sharded) for sharded in (False, True))
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert all(one.dtype == torch.float32 for one in found.values())
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def test_weights_moments_and_loss_stay_in_fp32(one: World) -> None:
    config = configs.recipes.tiny().override({"parallel.precision": "bf16"})
    model = parallelize(skeleton(config.model, 256), config.parallel, one)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = torch.zeros(1, 8, dtype=torch.int64)
    assert model(ids).dtype == torch.bfloat16
    assert model(ids, ids)[0].dtype == torch.float32


def test_a_hook_on_the_embedding_runs(one: World) -> None:
    config = configs.recipes.tiny().override({"parallel.precision": "bf16"})
    model, seen = parallelize(skeleton(config.model, 256), config.parallel, one), list[torch.dtype]()
    model.get_submodule("embedding").register_forward_hook(lambda module, inputs, found: seen.append(found.dtype))
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert seen == [torch.bfloat16]
