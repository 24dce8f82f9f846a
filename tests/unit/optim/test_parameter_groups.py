"""Rate, decay and frozen by pattern of names, against torch's optimizers with the groups written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from springtide.config import Tokens, build
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.errors import ConfigError
from springtide.model import Decoder
from springtide.model import build as decoder
from springtide.optim.build import optimizer_of
from springtide.optim.parameter_groups import blocks_freeze_alike, check_groups, freeze
from springtide.optim.schedule import set_learning_rate

SIZES = ModelConfig(num_layers=2, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=48)
WIDE = SIZES.model_copy(update={"base_width": 16})


def optim(*groups: dict[str, Any], **changes: Any) -> OptimConfig:
    return OptimConfig.model_validate({"peak_lr": 0.01, "warmup": Tokens(0), "groups": groups, **changes})


def trained(model: Decoder, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The weights after three steps with gradients that depend on nothing but the place."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if parameter.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("wider", [1.0, 2.0])
def test_adamw_with_groups_is_torchs_with_the_groups_written_out(wider: float) -> None:
    """Also where the model's width has its say: a group's factors are on top of it."""
    sizes = SIZES if wider == 1.0 else WIDE
    config = optim(
        {"match": "embedding.*", "weight_decay": 0.0, "lr_scale": 0.5},
        {"match": "blocks.0.*", "frozen": True},
        {"match": "*.ffn.*", "lr_scale": 3.0, "weight_decay": 0.2},
        {"match": "blocks.1.*norm.weight", "weight_decay": 0.3},
    )
    model, twin = decoder(sizes, 100), decoder(sizes, 100)
    freeze(model, config)
    ours = optimizer_of(model, config)
    set_learning_rate(ours, 0.01)
    named = dict(twin.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(not name.startswith("blocks.0."))
    shared = {"betas": (0.9, 0.95), "eps": 1e-8}
    attention = [one for name, one in named.items() if name.startswith("blocks.1.attention.")]
    theirs = torch.optim.AdamW(
        [
            {"params": [named["embedding.weight"]], "lr": 0.005, "weight_decay": 0.0},
            {"params": attention, "lr": 0.01 / wider, "weight_decay": 0.1 * wider},
            {
                "params": [one for name, one in named.items() if name.startswith("blocks.1.ffn.")],
                "lr": 0.03 / wider,
                "weight_decay": 0.2 * wider,
            },
            {
                "params": [named["blocks.1.attention_norm.weight"], named["blocks.1.ffn_norm.weight"]],
                "lr": 0.01,
                "weight_decay": 0.3,
            },
            {"params": [named["norm.weight"]], "lr": 0.01, "weight_decay": 0.0},
        ],
        **shared,
    )
    begun = {name: one.detach().clone() for name, one in model.named_parameters()}
    for found, expected in zip(trained(model, ours), trained(twin, theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    for name, one in model.named_parameters():
        assert torch.equal(one, begun[name]) == name.startswith("blocks.0."), name
    assert {id(one) for one in ours.state} == {id(one) for one in model.parameters() if one.requires_grad}


def test_muon_takes_a_groups_rate_and_decay_for_its_matrices() -> None:
    config = optim(
        {"match": "blocks.1.*", "lr_scale": 2.0, "weight_decay": 0.0}, {"match": "norm.*", "lr_scale": 4.0},
        optimizer="muon",
    )  # fmt: skip
    model, twin = decoder(SIZES, 100), decoder(SIZES, 100)
    ours = optimizer_of(model, config)
    set_learning_rate(ours, 0.01)
    named = dict(twin.named_parameters())

    def matrices(block: str) -> list[torch.Tensor]:
        return [one for name, one in named.items() if name.startswith(block) and one.dim() == 2]

    muon = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    adamw: dict[str, Any] = {"betas": (0.9, 0.95)}
    vectors = [one for name, one in named.items() if one.dim() < 2 and name.startswith("blocks.0.")]
    faster = [one for name, one in named.items() if one.dim() < 2 and name.startswith("blocks.1.")]
    theirs = [
        torch.optim.Muon(matrices("blocks.0."), lr=0.01, weight_decay=0.1, **muon),
        torch.optim.Muon(matrices("blocks.1."), lr=0.02, weight_decay=0.0, **muon),
        torch.optim.AdamW([named["embedding.weight"]], lr=0.01, weight_decay=0.1, **adamw),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0, **adamw),
        torch.optim.AdamW(faster, lr=0.02, weight_decay=0.0, **adamw),
        torch.optim.AdamW([named["norm.weight"]], lr=0.04, weight_decay=0.0, **adamw),
    ]
    begun = [one.detach().clone() for one in model.parameters()]
    found, expected = trained(model, ours), trained(twin, *theirs)
    for (name, _), before, one, other in zip(model.named_parameters(), begun, found, expected, strict=True):
        # torch makes matrices orthogonal in bf16
        muons = name.startswith("blocks.") and one.dim() == 2
        assert (one - other).norm() < (0.03 if muons else 1e-5) * (one - before).norm(), name


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    model = decoder(SIZES, 100)
    with pytest.raises(ConfigError, match=r"optim\.groups\.1\.match = 'embeding\.weight'") as error:
        check_groups(model, optim({"match": "norm.*"}, {"match": "embeding.weight"}))
    assert "embedding.weight" in str(error.value)
    with pytest.raises(ConfigError, match=r"optim\.groups = \['\*'\]: .*freezes"):
        check_groups(model, optim({"match": "*", "frozen": True}))
    check_groups(model, optim({"match": "*", "lr_scale": 2.0}))


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"match": ""}, "optim.groups.0.match"),
        ({"match": "*", "lr_scale": 0}, "optim.groups.0.lr_scale"),
        ({"match": "*", "weight_decay": -1}, "optim.groups.0.weight_decay"),
        ({"match": "*", "decay": 0}, "optim.groups.0.decay"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_by_name(group: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build({"optim": {"groups": [group]}})


@pytest.mark.parametrize(("pattern", "alike"), [("blocks.*", True), ("blocks.1.*", False), ("*.ffn.up.*", True)])
def test_memory_is_predicted_from_blocks_frozen_alike(pattern: str, alike: bool) -> None:
    """Memory is predicted from few blocks only if all are frozen alike."""
    assert blocks_freeze_alike(decoder(SIZES, 100), optim({"match": pattern, "frozen": True})) == alike
