"""Widths under one parametrisation: what training moves stays of one size, or grows with the width."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from summed_loss import token_loss
from torch import Tensor, nn

from springtide.config.engine import ModelConfig, OptimConfig
from springtide.model import Decoder, KVCache, build
from springtide.optim.build import optimizer_of
from springtide.optim.schedule import set_learning_rate

BASE, WIDTHS, VOCABULARY = 32, (32, 64, 128, 256), 97
STEPS, RATE = 16, 0.01
ROWS_BL = torch.randint(VOCABULARY, (16, 33), generator=torch.Generator().manual_seed(0))
HEADS: dict[str, dict[str, Any]] = {
    "wider heads": {"num_heads": 4, "num_kv_heads": 2},
    "more heads": {"head_dim": 8, "tied_head": False, "scaled_embedding": True},
}
FORWARD = ("attention.query", "attention.key", "attention.value", "attention.out", "ffn.gate", "ffn.up", "ffn.down")


def sized(dim: int, base_width: int, **options: Any) -> ModelConfig:
    if "head_dim" in options:
        options |= {"num_heads": dim // options["head_dim"], "num_kv_heads": dim // options["head_dim"]}
    return ModelConfig(num_layers=2, dim=dim, ffn_dim=2 * dim, max_sequence_length=32, base_width=base_width, **options)


def activations(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What the last block computes, and the logits."""
    found: dict[str, Tensor] = {}
    attend = F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        scale = 1.0 / math.sqrt(q.shape[-1]) if options["scale"] is None else options["scale"]
        found["scores"] = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
        return attend(q, k, v, **options)

    def keep(name: str) -> Any:
        return lambda _module, _given, made: found.__setitem__(name, made)

    block = model.blocks[-1]
    hooks = [block.get_submodule(name).register_forward_hook(keep(name)) for name in FORWARD]
    hooks.append(block.register_forward_hook(keep("stream")))
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(F, "scaled_dot_product_attention", seen)
        found["logits"] = model(ROWS_BL[:, :-1])[..., :VOCABULARY]
    for hook in hooks:
        hook.remove()
    return found


def trained(model: nn.Module, steps: int = STEPS, rate: float = RATE) -> list[float]:
    """Losses of so many steps of AdamW on the same rows."""
    optimizer, losses = optimizer_of(model, OptimConfig()), []
    set_learning_rate(optimizer, rate)
    for _ in range(steps):
        total, nats = token_loss(model, ROWS_BL, z_weight=1e-4)
        (total / ROWS_BL[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(nats))
    return losses


def growths(base_width: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], ...]:
    """Powers of the width by which root mean squares of activations grow: of the first ones, and of what training adds."""
    first: dict[str, list[float]] = defaultdict(list)
    added: dict[str, list[float]] = defaultdict(list)
    for dim in WIDTHS:
        model = build(sized(dim, base_width, **options), VOCABULARY)
        before = activations(model, monkeypatch)
        trained(model)
        for name, after in activations(model, monkeypatch).items():
            first[name].append(float(before[name].square().mean().sqrt().log()))
            added[name].append(float((after - before[name]).square().mean().sqrt().log()))
    x = [math.log(dim) for dim in WIDTHS]
    return tuple(
        {name: statistics.linear_regression(x, y).slope for name, y in found.items()} for found in (first, added)
    )


@pytest.mark.parametrize("heads", HEADS)
def test_what_training_adds_to_activations_is_of_one_size_at_every_width(
    heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, added = growths(BASE, HEADS[heads], monkeypatch)
    for name in (*FORWARD, "stream"):
        assert abs(first[name]) < 0.1, (name, first)
    # queries and keys of first weights have products that shrink as heads get wider: only what is learned lines them up
    for name, power in added.items():
        assert -0.3 < power < 0.15, (name, added)
    assert abs(added["logits"]) < 0.15


def test_in_the_standard_parametrisation_it_grows_with_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    _, added = growths(0, HEADS["wider heads"], monkeypatch)
    assert min(added.values()) > 0.3, added


@pytest.mark.parametrize("options", [*HEADS.values(), {"num_heads": 4, "num_kv_heads": 1, "qk_norm": "head"}])
def test_at_the_base_width_all_is_as_without_it(options: dict[str, Any]) -> None:
    models = [build(sized(BASE, base_width, **options), VOCABULARY) for base_width in (0, BASE)]
    for again in range(2):
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one, other)
        if not again:
            assert trained(models[0]) == trained(models[1])


@pytest.mark.parametrize("heads", HEADS)
def test_a_wider_models_loss_is_that_of_its_logits_and_a_text_may_be_read_in_parts(heads: str) -> None:
    model = build(sized(4 * BASE, BASE, **HEADS[heads]), VOCABULARY)
    trained(model, steps=2)
    model.requires_grad_(False)
    _, nats = token_loss(model, ROWS_BL)
    logits_BLV = model(ROWS_BL[:, :-1])
    assert float(nats) == pytest.approx(
        float(F.cross_entropy(logits_BLV.flatten(0, 1), ROWS_BL[:, 1:].flatten(), reduction="sum")), rel=1e-5
    )
    past = KVCache(model.config.num_layers)
    parts = [model(part, past=past) for part in (ROWS_BL[:, :7], ROWS_BL[:, 7:-1])]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits_BLV)


def test_matrices_of_blocks_learn_slower_and_decay_like_the_others() -> None:
    config = OptimConfig(weight_decay=0.1)
    model = build(sized(4 * BASE, BASE, **HEADS["wider heads"]), VOCABULARY)
    optimizer = optimizer_of(model, config)
    set_learning_rate(optimizer, 0.02)
    found = {
        parameter: (group["lr"], group["lr"] * group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(found) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        rate = 0.005 if name.startswith("blocks.") and parameter.dim() == 2 else 0.02
        assert found[parameter] == pytest.approx((rate, 0.002 if parameter.dim() == 2 else 0.0)), name
