"""The learning rate as a function of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.config import Tokens
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.model import build
from springtide.train.optim import adamw, learning_rate

COSINE = OptimConfig(peak_lr=1.0, warmup=Tokens(100), final_lr_ratio=0.1)
WSD = COSINE.model_copy(update={"schedule": "wsd", "decay": Tokens(200)})


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


@given(st.integers(100, 2000), st.sampled_from([COSINE, WSD]))
def test_after_the_warm_up_the_rate_never_rises(tokens: int, config: OptimConfig) -> None:
    assert learning_rate(config, tokens, 1000) >= learning_rate(config, tokens + 1, 1000) >= 0.1


def test_vectors_are_not_decayed() -> None:
    optimizer = adamw(build(ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=1), 100), COSINE)
    decayed, plain = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
