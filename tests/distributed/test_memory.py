"""The bytes that are predicted for a layout, against what the allocators of real ranks count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import memory

from springtide import config as configs
from springtide.config import Config
from springtide.planning.step_memory import predicted_bytes

pytestmark = pytest.mark.distributed
VOCABULARY = 4096


def laid_out(layers: int = 8, **changes: Any) -> Config:
    """Wide enough that a block counts."""
    model = {"num_layers": layers, "dim": 192, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 768}
    dotted = {f"model.{key}": value for key, value in model.items()} | {"parallel.reduction": "fp32"}
    return configs.recipes.demo().override(dotted | {"stream.global_batch": 8, "train.micro_batch": 2} | changes)


@pytest.mark.parametrize(
    ("strategy", "precision", "recompute", "optimizer"),
    [
        ("ddp", "fp32", "none", "adamw"),
        pytest.param("zero1", "fp32", "full", "adamw", marks=pytest.mark.full),
        # processors without bf16 arithmetic take minutes
        pytest.param("zero1", "bf16", "full", "adamw", marks=pytest.mark.full),
        pytest.param("zero3", "bf16", "selective", "muon", marks=pytest.mark.full),
    ],
)
def test_what_is_predicted_is_what_ranks_hold(
    ranks: Callable[..., list[Any]], strategy: str, precision: str, recompute: str, optimizer: str
) -> None:
    changes = {"parallel.strategy": strategy, "parallel.precision": precision, "parallel.recompute": recompute}
    config = laid_out(**changes, **{"optim.optimizer": optimizer})
    expected = predicted_bytes(config, VOCABULARY, 0, world_size=2)
    for found in ranks(2, memory, config, VOCABULARY):
        assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.full
def test_a_layout_that_is_to_save_memory_does() -> None:
    def predicted(world_size: int = 4, **changes: Any) -> int:
        dotted = {f"parallel.{key}": value for key, value in changes.items()}
        return predicted_bytes(laid_out(**dotted), VOCABULARY, 0, world_size)

    by_strategy = [predicted(strategy=strategy) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert by_strategy == sorted(by_strategy, reverse=True)
    assert predicted(recompute="none") > predicted(recompute="selective") > predicted(recompute="full")
    assert predicted(precision="bf16") < predicted(precision="fp32")
    assert predicted(world_size=4) < predicted(world_size=2)
    deep = predicted_bytes(laid_out(layers=12), VOCABULARY, 0, 4)
    twice = predicted_bytes(laid_out(layers=24), VOCABULARY, 0, 4)
    assert 1.5 < twice / deep < 2.0  # the embedding and the head do not double
