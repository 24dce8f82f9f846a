"""The learning rate as a function of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.config import Tokens
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.errors import ConfigError
from springtide.model import build
from springtide.optim.build import optimizer_of
from springtide.optim.muon import orthogonalized
from springtide.optim.schedule import learning_rate

COSINE = OptimConfig(peak_lr=1.0, warmup=Tokens(100), final_lr_ratio=0.1)
LINEAR = COSINE.model_copy(update={"schedule": "linear"})
WSD = COSINE.model_copy(update={"schedule": "wsd", "decay": Tokens(200)})
ROOT = WSD.model_copy(update={"schedule": "wsd_sqrt"})


def test_warm_up_is_linear_from_zero() -> None:
    assert [learning_rate(COSINE, tokens, 1000) for tokens in (0, 25, 50)] == [0.0, 0.25, 0.5]


def test_cosine_falls_from_the_peak_to_the_floor() -> None:
    assert learning_rate(COSINE, 100, 1000) == 1.0
    assert learning_rate(COSINE, 550, 1000) == pytest.approx(0.55)
    assert learning_rate(COSINE, 1000, 1000) == pytest.approx(0.1)


def test_wsd_is_stable_and_then_falls_linearly() -> None:
    assert learning_rate(WSD, 100, 1000) == learning_rate(WSD, 800, 1000) == 1.0
    assert learning_rate(WSD, 900, 1000) == pytest.approx(0.55)
    assert learning_rate(WSD, 1000, 1000) == pytest.approx(0.1)


def test_linear_falls_from_the_peak_to_the_floor() -> None:
    """Linear falls from the peak to the floor which may be zero."""
    assert [learning_rate(LINEAR, tokens, 1000) for tokens in (100, 550, 1000)] == pytest.approx([1.0, 0.55, 0.1])
    zero = LINEAR.model_copy(update={"final_lr_ratio": 0.0})
    assert [learning_rate(zero, tokens, 1000) for tokens in (100, 775, 1000)] == pytest.approx([1.0, 0.25, 0.0])


def test_one_minus_the_root_falls_fast_at_first() -> None:
    """Haegele et al. (2024), equation 1: 1 - sqrt((n - (N - decay)) / decay)."""
    zero = ROOT.model_copy(update={"final_lr_ratio": 0.0})
    assert [learning_rate(zero, tokens, 1000) for tokens in (100, 800, 850, 900, 1000)] == pytest.approx(
        [1.0, 1.0, 0.5, 1.0 - 0.5**0.5, 0.0]
    )


def test_cosine_and_linear_are_those_of_torch() -> None:
    scheduler = torch.optim.lr_scheduler
    for config, make in (
        (COSINE, lambda optimizer: scheduler.CosineAnnealingLR(optimizer, 900, eta_min=0.1)),
        (LINEAR, lambda optimizer: scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=900)),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = make(optimizer)
        for tokens in range(100, 1001):
            assert learning_rate(config, tokens, 1000) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), tokens
            optimizer.step()
            theirs.step()


@given(st.integers(100, 2000), st.sampled_from([COSINE, LINEAR, WSD, ROOT]))
def test_after_the_warm_up_the_rate_never_rises(tokens: int, config: OptimConfig) -> None:
    assert learning_rate(config, tokens, 1000) >= learning_rate(config, tokens + 1, 1000) >= 0.1


def test_vectors_are_not_decayed() -> None:
    optimizer = optimizer_of(build(ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=1), 100), COSINE)
    decayed, plain = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_orthogonalized_keeps_singular_vectors_and_brings_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values.max() / values.min() > 2
    in_its_frame = left.T @ orthogonalized(matrix) @ right.T
    assert torch.all((in_its_frame.diagonal() > 0.6) & (in_its_frame.diagonal() < 1.3))
    assert (in_its_frame - in_its_frame.diagonal().diag()).abs().max() < 1e-4


def test_muon_moves_block_matrices_as_torch_does() -> None:
    """Muon moves the matrices of blocks as torchs does and all else as adamw."""
    sizes = ModelConfig(num_layers=2, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=48)
    config = COSINE.model_copy(update={"optimizer": "muon", "peak_lr": 0.01})
    model, twin = build(sizes, 100), build(sizes, 100)
    ours = optimizer_of(model, config)
    matrices = [p for p in twin.blocks.parameters() if p.dim() == 2]
    known = {id(p) for p in matrices}
    others = [p for p in twin.parameters() if id(p) not in known]
    theirs = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in others if p.dim() >= 2], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW([p for p in others if p.dim() < 2], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    begun = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for before, parameter, other in zip(begun, model.parameters(), twin.parameters(), strict=True):
        moved = (parameter - before).norm()
        # torch makes matrices orthogonal in bf16
        assert (parameter - other).norm() < (0.03 if id(other) in known else 1e-6) * moved


def test_muon_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.optimizer = 'muon': .*adamw"):
        optimizer_of(torch.nn.Linear(4, 4), COSINE.model_copy(update={"optimizer": "muon"}))
