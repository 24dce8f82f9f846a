"""A frozen base in fewer bits: how far from the weights it is; adapters learn on it what they learn on plain matrices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from springtide.config import Config
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError
from springtide.model import (
    Decoder,
    build,
    flops_per_token,
    hardware_flops_per_token,
    make,
    num_parameters,
    packed_shapes,
)
from springtide.model.frozen import BLOCK, LEVELS, as_held, converted, pack, row_bytes, unpack
from springtide.optim.parameter_groups import freeze
from springtide.planning.step_memory import predicted_bytes
from springtide.training.state import initialize

SHAPE = {"num_layers": 2, "dim": 48, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 80, "max_sequence_length": 32}
VOCAB = 100


def adapted(precision: str, **changes: object) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, "adapter": "lora", "base_precision": precision, **changes})


def moved(config: ModelConfig) -> Decoder:
    """A decoder that is frozen but for its adapters, whose B has left zero."""
    model = build(config, VOCAB)
    freeze(model, Config().optim)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def plain(model: Decoder, config: ModelConfig) -> Decoder:
    """The same model with an fp32 base of the values that are held."""
    found = build(config.model_copy(update={"base_precision": "fp32"}), VOCAB)
    shapes = packed_shapes(model)
    with torch.no_grad():
        for (name, one), other in zip(model.named_parameters(), found.parameters(), strict=True):
            other.copy_(converted(one, shapes[name][1], torch.float32) if name in shapes else one)
    freeze(found, Config().optim)
    return found


def test_levels_are_those_of_the_paper() -> None:
    """Appendix E of QLoRA, to six digits."""
    told = [-1.0, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.09105, 0.0]
    told += [0.07958, 0.16093, 0.246112, 0.337915, 0.44071, 0.562617, 0.722957, 1.0]
    assert LEVELS.tolist() == pytest.approx(told, abs=1e-6)


@given(st.integers(1, 5), st.integers(1, 3 * BLOCK), st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_no_weight_is_further_away_than_half_the_widest_gap(rows: int, inputs: int, seed: int, power: float) -> None:
    W = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    packed = pack(W)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (rows, row_bytes(inputs)))
    found = unpack(packed, inputs)
    gaps = LEVELS.diff()
    for begin in range(0, inputs, BLOCK):
        block, again = W[:, begin : begin + BLOCK], found[:, begin : begin + BLOCK]
        largest = block.abs().amax(1, keepdim=True)
        assert bool(((block - again).abs() <= largest * gaps.max() * 0.5 * (1 + 1e-5)).all())
        at = block.abs().argmax(1, keepdim=True)
        assert torch.equal(again.gather(1, at).abs(), largest), "the largest magnitude is kept"
    assert torch.equal(unpack(pack(found), inputs), found), "what is packed once stays"
    cut = rows // 2
    assert torch.equal(torch.cat([pack(W[:cut]), pack(W[cut:])]), packed), "any cut of the rows"


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    assert not unpack(pack(torch.zeros(2, 70)), 70).any()
    assert unpack(pack(torch.tensor([[1.0, math.nan]])), 2).isnan().any()


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
@pytest.mark.parametrize(
    "changes", [{}, {"adapter": "dora", "adapter_targets": ("*.attention.*",), "tied_head": False}], ids=str
)
def test_adapters_learn_what_they_learn_on_plain_matrices(precision: str, changes: dict[str, object]) -> None:
    """Loss, logits, log-probabilities and every gradient are those of a base in fp32 of the same values."""
    config = adapted(precision, qkv_bias=True, **changes)
    model = moved(config)
    assert model.blocks[0].ffn.up.weight.dtype == {"bf16": torch.bfloat16, "nf4": torch.uint8}[precision]
    expected = plain(model, config)
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    found = {}
    for name, one in (("held", model), ("plain", expected)):
        total, nats = one(tokens[:, :-1], tokens[:, 1:])
        total.backward()
        with torch.no_grad():
            by_token = one(tokens[:, :-1], tokens[:, 1:], by_token=True)
            found[name] = total, nats, one(tokens), by_token
    for held, other in zip(found["held"], found["plain"], strict=True):
        torch.testing.assert_close(held, other, rtol=1e-5, atol=1e-5)
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    for name, one in expected.named_parameters():
        if one.requires_grad:
            torch.testing.assert_close(trained[name], one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_autograd_keeps_what_is_held_and_no_converted_matrix() -> None:
    model = moved(adapted("nf4", dim=256, ffn_dim=512, num_layers=1))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    assert not [one.shape for one in kept if one.is_floating_point() and one.numel() >= 256 * 128]


def test_the_initial_weights_are_those_of_the_plain_model_packed() -> None:
    """Also as a worker group fills them."""
    config = adapted("nf4")
    expected, found = build(config.model_copy(update={"base_precision": "fp32"}), VOCAB), build(config, VOCAB)
    again = make(config, VOCAB)
    assert isinstance(again, Decoder)
    again.place(torch.device("cpu"))
    initialize(again, config, VOCAB)
    for (name, one), held, other in zip(
        expected.named_parameters(), found.parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(held, as_held(one, held.dtype)), name
        assert torch.equal(held, other), name


def test_a_packed_model_costs_a_fraction_of_the_memory() -> None:
    """A packed model costs the same arithmetic and a fraction of the memory."""
    bytes_of, costs = {}, set()
    for precision in ("fp32", "nf4"):
        config = adapted(precision, dim=256, ffn_dim=1024, num_layers=1)
        model = make(config, VOCAB)
        freeze(model, Config().optim)
        costs.add((num_parameters(model), flops_per_token(model, 32), hardware_flops_per_token(model, 32, "full")))
        changes = {f"model.{name}": value for name, value in config.model_dump().items()}
        small = {"stream.global_batch": 2, "train.micro_batch": 1, "shards.sequence_length": 8}
        bytes_of[precision] = predicted_bytes(Config().override({**changes, **small}), VOCAB, None, 2)
    assert len(costs) == 1
    assert bytes_of["nf4"] < 0.7 * bytes_of["fp32"]


def test_a_base_that_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.base_precision = 'nf4': .*model\.adapter"):
        Config().override({"model.base_precision": "nf4"})
