"""Products in fp8: which layers have them, what is refused, and what torchao's layers compute here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch
from one_batch import backward_of_one_batch
from torch import Tensor, nn

from springtide import config as configs
from springtide.checkpoint.tensors import local, named_tensors, plain_name
from springtide.config import Config
from springtide.distributed import World, fsdp
from springtide.distributed.float8 import check_installed, convert, converts, emulated
from springtide.distributed.fsdp import parallelize
from springtide.errors import ConfigError
from springtide.model import AdaptedLinear, skeleton
from springtide.planning.step_memory import predicted_bytes
from springtide.ray.cluster.session import check_precision

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs springtide[fp8]")
TINY = configs.recipes.tiny().override({"model.tied_head": False})


def test_matrices_of_blocks_are_converted_and_nothing_else() -> None:
    model = skeleton(TINY.model, 256)
    assert sum(map(converts, model.blocks.modules())) == 7 * TINY.model.num_layers
    assert not converts(model.norm)
    assert not converts(nn.Linear(16, 24))
    assert not converts(AdaptedLinear(nn.Linear(16, 16), 4, 1.0, with_magnitude=False))


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "needs torchao, which is not installed"), ("0.99.1", r"0\.99\.1 is installed"), ("0.18.2", "")],
)
def test_what_is_missing_is_said_with_the_wheel(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    if not said:
        check_installed("fp8")
        return
    with pytest.raises(ConfigError, match=rf"parallel\.precision = 'fp8': .*{said}.*springtide\[fp8\].*torchao>=0\.18"):
        check_installed("fp8")
    nodes = [{"GPU": 8.0, "accelerator_type:H100": 1.0}]
    with pytest.raises(ConfigError, match=said):  # in the driver, before anything starts
        check_precision(TINY.override({"parallel.precision": "fp8", "elastic.gpus_per_worker": 1}), nodes)


@pytest.mark.parametrize(
    ("capability", "said"),
    [((8, 0), "a Fake has no arithmetic of 8 bits; use bf16, or an L4"), (None, "a cpu has no arithmetic of 8 bits")],
)
def test_a_device_without_it_is_refused(
    capability: tuple[int, int] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.distributed.float8.check_installed", lambda precision: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    blocks, device = skeleton(TINY.model, 256).blocks, torch.device("cuda" if capability else "cpu")
    with pytest.raises(ConfigError, match=said):
        convert(blocks, "fp8", "tensorwise", device, gathers=True)
    with pytest.raises(ConfigError, match="multiples of 16"):
        convert(nn.ModuleList([nn.Linear(8, 8)]), "fp8", "tensorwise", device, gathers=True)


def test_unsuitable_devices_and_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of the cluster and settings that do not go with it are refused."""
    monkeypatch.setattr("springtide.distributed.float8.check_installed", lambda precision: None)
    wanted = TINY.override({"parallel.precision": "fp8_rowwise", "elastic.gpus_per_worker": 1})
    check_precision(wanted, [{"GPU": 1.0, "accelerator_type:L4": 1.0}])
    with pytest.raises(ConfigError, match=r"'fp8_rowwise': .*A100 .*bf16"):
        check_precision(wanted, [{"GPU": 1.0, "accelerator_type:A100": 1.0}])
    with pytest.raises(ConfigError, match=r"16 tokens.* 40\b.*shards\.sequence_length.* 32\b"):
        wanted.override({"shards.sequence_length": 40})
    with pytest.raises(ConfigError, match=r"model\.adapter = 'lora' .*bf16"):
        wanted.override({"model.adapter": "lora"})


def test_its_step_is_predicted_as_that_of_bf16() -> None:
    changed = [TINY.override({"parallel.precision": name}) for name in ("bf16", "fp8")]
    assert changed[1].parallel.computes_in == "bf16"
    assert len({predicted_bytes(one, 256, None, 2) for one in changed}) == 1


def gradients(config: Config, one: World, sharded: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch, and the gradients, fp32."""
    with emulated():
        model: Any = skeleton(config.model, 256)
        if sharded:
            convert(model.blocks, config.parallel.precision, config.parallel.float8, one.device, gathers=True)
            fsdp._shard(model, model.blocks, config.parallel, one)
            model.place(one.device)
        else:
            parallelize(model, config.parallel, one)
    loss = backward_of_one_batch(model)
    assert {tensor.dtype for tensor in named_tensors(model).values()} == {torch.float32}
    assert all(type(local(tensor)) in (Tensor, nn.Parameter) for tensor in named_tensors(model).values())
    return loss, {plain_name(name): local(one.grad) for name, one in model.named_parameters()}


@needs_torchao
@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_a_process_alone_computes_what_shards_do_and_near_bf16(precision: str, one: World) -> None:
    config = TINY.override({"parallel.precision": precision, "model.qkv_bias": True})
    (loss, found), (expected_loss, expected) = (gradients(config, one, sharded) for sharded in (False, True))
    assert loss == expected_loss
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    _, half = gradients(config.override({"parallel.precision": "bf16"}), one, sharded=False)
    changed = {name for name in found if not torch.equal(found[name], half[name])}
    assert changed == set(found) - {"head.weight"} or changed == set(found)
    away = sum(float((found[name] - half[name]).square().sum()) for name in found)
    assert 0 < away / sum(float(one.square().sum()) for one in half.values()) < 0.06**2
