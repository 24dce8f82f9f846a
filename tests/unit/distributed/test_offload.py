"""What is left to the host: the same numbers, and less on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_batch import draw_weights, three_rows
from torch import Tensor

from springtide import config as configs
from springtide.checkpoint.tensors import local, named_tensors
from springtide.distributed import World, offload
from springtide.distributed.fsdp import parallelize
from springtide.distributed.offload import as_if_offloaded, weights_on
from springtide.errors import ConfigError
from springtide.model import skeleton
from springtide.optim.build import optimizer_of
from springtide.planning.arithmetic import model_size, predicted_step_bytes
from springtide.planning.step_memory import predicted_bytes
from springtide.training import StepSetup, Work, train_step

TINY = configs.recipes.tiny().override({"parallel.recompute": "full"})


def steps(one: World, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of two micro-batches, and the state afterwards."""
    config = TINY.override({f"parallel.{name}": value for name, value in changes.items()})
    model = parallelize(skeleton(config.model, 256), config.parallel, one)
    generator = draw_weights(model)
    optimizer = optimizer_of(model, config.optim, fused=False)
    ids = three_rows(generator)
    setup, work = StepSetup(model, optimizer, one, clip_norm=1.0), Work(ids, [slice(0, 2), slice(2, 3)], 96)
    found = [train_step(setup, work).loss for _ in range(3)]
    return found, {name: local(tensor).clone() for name, tensor in named_tensors(model, optimizer).items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_process_alone_learns_the_same_bits(precision: str, one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, state = steps(one, precision=precision)
    packed: list[Tensor] = []
    pack = offload._pack

    def counting(tensor: Tensor) -> Any:
        found = pack(tensor)
        packed.extend([tensor] if isinstance(found, tuple) else [])
        return found

    monkeypatch.setattr(offload, "_pack", counting)
    found, moved = steps(one, precision=precision, offload="all")
    assert found == expected
    assert moved.keys() == state.keys()
    assert not [name for name in moved if not torch.equal(moved[name], state[name])]
    inputs = [tensor for tensor in packed if tensor.shape[-1] == TINY.model.dim and tensor.dim() == 3]
    assert len(inputs) >= 3 * 2 * TINY.model.num_layers  # steps, micro-batches, blocks


def test_activations_need_blocks_that_are_recomputed() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.offload = 'all': .*'selective' .*parallel\.recompute"):
        TINY.override({"parallel.offload": "all", "parallel.recompute": "selective"})
    device = torch.device("cuda", 0)
    assert weights_on(TINY.parallel, device) == device
    assert weights_on(TINY.override({"parallel.offload": "parameters"}).parallel, device).type == "cpu"


def test_what_is_on_the_host_is_not_predicted_for_the_device() -> None:
    there = TINY.override({"elastic.gpus_per_worker": 1, "parallel.strategy": "zero3", "model.num_layers": 4})

    def both(changes: dict[str, Any]) -> tuple[int, int]:
        config = there.override(changes)
        size = model_size(config.model, 256, config.shards.sequence_length)
        return predicted_bytes(config, 256, None, 2), predicted_step_bytes(config, size, 2)

    found = {name: both({"parallel.offload": name}) for name in ("none", "activations", "parameters", "all")}
    for which in (0, 1):
        none, activations, parameters, everything = (found[name][which] for name in found)
        assert everything < min(activations, parameters) < none
    on_cpus = {"elastic.gpus_per_worker": 0}
    assert both(on_cpus | {"parallel.offload": "parameters"})[0] >= 0.98 * both(on_cpus)[0]


def test_numbers_that_would_be_on_the_host_are_nowhere() -> None:
    number = torch.ones(2, requires_grad=True) * 2
    with as_if_offloaded():
        assert offload._unpack(offload._pack(number)).shape == (2,)
    kept = offload._pack(number)
    assert isinstance(kept, tuple)
    assert torch.equal(offload._unpack(kept), number)
    assert offload._pack(number.detach()) is not kept
