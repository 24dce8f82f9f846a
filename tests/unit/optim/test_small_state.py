"""Optimizers whose state takes little memory: Adafactor, and AdamW with moments of 16 or 8 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from springtide import config as configs
from springtide.checkpoint.tensors import named_tensors
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.errors import ConfigError
from springtide.model import build
from springtide.optim.adafactor import Adafactor
from springtide.optim.build import optimizer_of
from springtide.optim.small_moments import SmallMomentsAdamW, _code_values
from springtide.planning.step_memory import predicted_bytes

SHAPES = {"matrix": (10, 300), "narrow": (9, 5), "kernel": (6, 4, 3), "vector": (11,)}
STEPS = 12


def gradients(step: int, zeros: float = 0.2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator)
        * 10.0 ** (step % 3 - 1)
        * (torch.rand(shape, generator=generator) > zeros)
        for name, shape in SHAPES.items()
    }


def trained(
    make: type, rows: dict[str, slice] | None = None, zeros: float = 0.2, **options: object
) -> dict[str, Tensor]:
    """The weights and the state after some steps, of all rows or of some."""
    model = nn.ParameterDict()
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(99))
        model[name] = nn.Parameter((weight[rows[name]] if rows else weight).clone())
    decayed = [{"params": list(model.values()), "weight_decay": 0.1}]
    optimizer = make(decayed, lr=0.02, **options)
    for step in range(STEPS):
        for name, gradient in gradients(step, zeros).items():
            model[name].grad = (gradient[rows[name]] if rows else gradient).clone()
        optimizer.step()
    return named_tensors(model, optimizer)


def test_adafactor_is_that_of_torch() -> None:
    found = trained(Adafactor, zeros=-1.0)
    theirs = trained(torch.optim.Adafactor, zeros=-1.0, eps=(1e-30, 1e-3))  # it divides 0 by 0 where there are zeros
    assert all(bool(tensor.isfinite().all()) for tensor in trained(Adafactor).values())
    for name in ("matrix", "narrow", "vector"):
        torch.testing.assert_close(found[f"model/{name}"], theirs[f"model/{name}"], rtol=1e-5, atol=1e-6)
    numbers = sum(tensor.numel() for name, tensor in found.items() if name.startswith("optim/"))
    assert numbers == (10 + 300) + (9 + 5) + (6 + 12) + 11 + len(SHAPES)


ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize(("moments", "tolerance"), [("bf16", 0.02), ("int8", 0.08)])
def test_small_moments_move_weights_about_as_adamw_does(moments: str, tolerance: float) -> None:
    found = trained(SmallMomentsAdamW, moments=moments, **ADAMW)
    expected = trained(torch.optim.AdamW, **ADAMW)
    for name in SHAPES:
        moved = (
            expected[f"model/{name}"] - torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(99))
        ).norm()
        assert (found[f"model/{name}"] - expected[f"model/{name}"]).norm() < tolerance * moved, name
    state = {name: tensor for name, tensor in found.items() if name.startswith("optim/matrix/")}
    assert sum(tensor.nbytes for tensor in state.values()) == {"bf16": 2 * 2, "int8": 2}[moments] * 3000 + 4 + (
        2 * 4 * 10 * 2 if moments == "int8" else 0
    )


def test_int8_keeps_fp32_for_vectors() -> None:
    found = trained(SmallMomentsAdamW, moments="int8", **ADAMW)
    theirs = trained(torch.optim.AdamW, **ADAMW)
    torch.testing.assert_close(found["model/vector"], theirs["model/vector"], rtol=1e-5, atol=1e-6)
    assert found["optim/vector/exp_avg"].dtype == torch.float32
    assert found["optim/matrix/exp_avg"].dtype == torch.uint8


@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from(["bf16", "int8"]))
def test_no_bit_depends_on_where_rows_are_cut(data: st.DataObject, moments: str) -> None:
    whole = trained(SmallMomentsAdamW, moments=moments, **ADAMW)
    cuts = {name: data.draw(st.integers(0, shape[0]), label=name) for name, shape in SHAPES.items()}
    first = trained(SmallMomentsAdamW, {name: slice(0, cut) for name, cut in cuts.items()}, moments=moments, **ADAMW)
    second = trained(
        SmallMomentsAdamW, {name: slice(cut, None) for name, cut in cuts.items()}, moments=moments, **ADAMW
    )
    for name, tensor in whole.items():
        if tensor.dim():
            assert torch.equal(torch.cat([first[name], second[name]]), tensor), name


@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_those_of_the_paper(signed: bool) -> None:
    """Dettmers et al. (2022), appendix: 256 values, ascending, from 0 to 1, symmetric if signed, seven decades."""
    values = _code_values(signed, torch.device("cpu"))
    assert len(values) == 256
    assert bool((values[1:] > values[:-1]).all())
    assert float(values[-1]) == 1.0
    assert float(values[127 if signed else 0]) == 0.0
    positive = values[values > 0]
    assert float(positive[0]) == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-3)
    if signed:
        assert torch.equal(values[:127].neg().flip(0), positive[:-1])


def test_what_moments_cannot_do_is_refused() -> None:
    for changes, problem in (
        ({"optim.moments": "int8", "optim.optimizer": "muon"}, "optim.optimizer = 'muon' keeps its own"),
        ({"optim.moments": "bf16", "optim.source": "mine:optimizer"}, "optim.source = 'mine:optimizer' keeps its own"),
        ({"optim.moments": "bf16", "optim.betas": (0.9, 0.999)}, "rounds a change of 1 - 0.999 of a moment away"),
    ):
        with pytest.raises(ConfigError, match=f"optim.moments = .*{problem}"):
            configs.recipes.tiny().override(changes)
    configs.recipes.tiny().override({"optim.moments": "int8", "optim.betas": (0.9, 0.999)})


def test_the_estimate_knows_their_bytes() -> None:
    wide = {
        "model.num_layers": 2,
        "model.dim": 256,
        "model.ffn_dim": 1024,
        "train.micro_batch": 1,
        "stream.global_batch": 2,
    }
    config = configs.recipes.tiny().override({**wide, "parallel.strategy": "ddp"})
    weights = sum(one.numel() for one in build(config.model, 300).parameters())
    kinds: dict[str, dict[str, str]] = {
        "fp32": {},
        "bf16": {"optim.moments": "bf16"},
        "int8": {"optim.moments": "int8"},
    }
    kinds["lamb"] = {"optim.optimizer": "lamb"}
    kinds["adafactor"] = {"optim.optimizer": "adafactor"}
    held = {}
    for kind, changes in kinds.items():
        optimizer = optimizer_of(build(config.model, 300), config.override(changes).optim)
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.zeros_like(one)
        optimizer.step()
        held[kind] = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert held["fp32"] >= 8 * weights
    assert held["bf16"] == pytest.approx(4 * weights, rel=0.01)
    assert held["int8"] == pytest.approx(2 * weights, rel=0.05)
    assert held["adafactor"] < 0.1 * weights
    assert held["lamb"] >= 8 * weights
    predicted = {kind: predicted_bytes(config.override(changes), 300, None, 1) for kind, changes in kinds.items()}
    for kind in ("bf16", "int8", "adafactor"):
        saved = predicted["fp32"] - predicted[kind]
        assert saved == pytest.approx(held["fp32"] - held[kind], rel=0.6), kind


def test_frozen_and_scaled_groups_hold_for_them_too() -> None:
    sizes = ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=48)
    groups = ({"match": "embedding.*", "lr_scale": 0.5, "weight_decay": 0.0},)
    for changes in ({"optimizer": "adafactor"}, {"moments": "int8"}):
        found = optimizer_of(build(sizes, 100), OptimConfig.model_validate({**changes, "groups": groups}))
        assert {(group["lr_scale"], group["weight_decay"]) for group in found.param_groups} == {
            (0.5, 0.0),
            (1.0, 0.1),
            (1.0, 0.0),
        }
