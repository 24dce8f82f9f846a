"""An adapter that cannot be is refused, with what can be."""

from __future__ import annotations

from typing import Any

import pytest

from springtide import Config
from springtide.config.files import changes_the_run, difference
from springtide.errors import ConfigError
from springtide.model import flops_per_token, make
from springtide.optim.parameter_groups import check_groups, freeze
from springtide.planning.step_memory import predicted_bytes
from springtide.training.start_check import check_adapter

SHAPE = {"model.num_layers": 2, "model.dim": 64, "model.num_heads": 4, "model.num_kv_heads": 2, "model.ffn_dim": 160}


def adapted(**changes: Any) -> Config:
    named = {f"model.{field}": value for field, value in changes.items()}
    return Config().override({**SHAPE, "model.adapter": "lora", **named})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"adapter_targets": ["*.attn.*"]},
            r"model.adapter_targets.0 = '\*.attn.\*': matches no matrix.*blocks.\d.attention",
        ),
        ({"adapter_targets": ["*.ffn.*", "head.weight"]}, r"adapter_targets.1 = 'head.weight': matches no matrix"),
        ({"adapter_targets": ["*_norm*"]}, "matches no matrix"),
        (
            {"adapter_rank": 33},
            r"adapter_rank = 33: is more than the smaller side of blocks.0.attention.key.weight.*32",
        ),
    ],
    ids=str,
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(changes: dict[str, Any], told: str) -> None:
    config = adapted(**changes)
    with pytest.raises(ConfigError, match=told):
        check_groups(make(config.model, 257), config.optim)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adapter_rank": 0}, "model.adapter_rank = 0"),
        ({"adapter_alpha": -1.0}, "model.adapter_alpha = -1"),
        ({"adapter_targets": []}, "model.adapter_targets"),
        ({"source": "mine:model"}, r"model.adapter = 'lora'.*names a model of your own"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adapted(**changes)


def test_an_adapter_needs_weights_and_has_a_fixed_rank() -> None:
    """An adapter needs weights and its rank is part of the run."""
    config = adapted()
    with pytest.raises(ConfigError, match=r"model\.adapter = 'lora': .*train\.start_from"):
        check_adapter(config)
    check_adapter(config.override({"train.start_from": "runs/base"}))
    assert "model.adapter_rank" in changes_the_run(difference(config, adapted(adapter_rank=4)))


def test_frozen_weights_cost_no_gradients_or_moments() -> None:
    """What is frozen costs no memory for gradients and moments and less arithmetic."""

    def cost(config: Config) -> tuple[float, float]:
        model = make(config.model, 2048)
        freeze(model, config.optim)
        return predicted_bytes(config, 2048, None, 1), flops_per_token(model, 128)

    small = {"model.dim": 256, "model.ffn_dim": 1024, "stream.global_batch": 8, "train.micro_batch": 1}
    small["shards.sequence_length"] = 32
    (whole, whole_flops), (lora, lora_flops) = (
        cost(adapted(adapter=kind).override(small)) for kind in ("none", "lora")
    )
    assert lora < 0.5 * whole
    assert 4 / 6 < lora_flops / whole_flops < 0.8
