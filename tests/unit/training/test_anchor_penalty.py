"""The penalty is a term of the loss: its gradient, the norm and the update are those of autograd on the plain formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import run_here

from springtide.checkpoint.tensors import plain_name
from springtide.config import Config
from springtide.distributed import World
from springtide.errors import ConfigError
from springtide.model import build
from springtide.planning.step_memory import predicted_bytes
from springtide.training.anchor import Anchor, trained, what_is_bad
from springtide.training.fisher import fisher_information, training_rows
from springtide.training.losses import row_losses
from springtide.training.part import StepResult, Work
from springtide.training.step import StepSetup, train_step

SHAPE = {"model.num_layers": 2, "model.dim": 16, "model.num_heads": 2, "model.num_kv_heads": 2, "model.ffn_dim": 24}
VOCABULARY, ROWS, LENGTH = 61, 5, 12


def model_of() -> torch.nn.Module:
    """A small decoder with weights of some size; the embedding is frozen."""
    torch.manual_seed(17)
    model = build(Config().override(SHAPE).model, VOCABULARY)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
        parameter.requires_grad_("embedding" not in name)
    return model


def rows_of() -> torch.Tensor:
    """Ids, of which some are not predicted: the tokens of a step are fewer than those of a full one."""
    torch.manual_seed(18)
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    return torch.where(torch.rand(rows.shape) < 0.3, ~rows, rows)


def anchor_of(model: torch.nn.Module, weight: float, has_fisher: bool) -> Anchor:
    """An anchor at other weights."""
    settings = {"objective.anchor": "fisher" if has_fisher else "l2sp", "objective.anchor_weight": weight}
    anchor = Anchor(model, Config().override(settings))
    torch.manual_seed(19)
    for name, origin in anchor._origins.items():
        origin.copy_(torch.randn_like(origin) * 0.3)
        if has_fisher:
            anchor._fishers[name].copy_(torch.rand_like(origin))
    return anchor


def step_of(world: World, anchor: Anchor, model: Any, optimizer: Any, work: Work, **options: Any) -> StepResult:
    """One step."""
    return train_step(StepSetup(model, optimizer, world, parts=[anchor], **options), work)


@pytest.mark.parametrize("has_fisher", [False, True], ids=["l2sp", "ewc"])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_step_is_that_of_loss_and_penalty(has_fisher: bool, loss_scale: float, clip_norm: float) -> None:
    weight, ours, theirs, rows = 0.7, model_of(), model_of(), rows_of()
    anchor = anchor_of(ours, weight, has_fisher)
    work = Work(rows, [slice(0, 2), slice(2, 5)], ROWS * LENGTH)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    found = run_here(step_of, anchor, ours, optimizer, work, clip_norm=clip_norm, loss_scale=lambda: loss_scale)
    total, _ = row_losses(theirs, rows)
    tokens, penalty = int((rows[:, 1:] >= 0).sum()), torch.zeros(())
    for name, parameter in trained(theirs).items():
        fisher = anchor._fishers.get(f"model/{name}", torch.ones(()))
        penalty = penalty + weight / 2 * (fisher * (parameter - anchor._origins[f"model/{name}"]) ** 2).sum()
    (total / tokens + penalty).backward()
    total, penalty = total.detach(), penalty.detach()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or math.inf)
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert found.loss == pytest.approx(float(total) / tokens, rel=1e-5), "the loss stays that of the text"
    assert found.extra == {"anchor_penalty": pytest.approx(float(penalty), rel=1e-5)}
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_penalty_that_is_not_finite_changes_no_weights() -> None:
    model, rows = model_of(), rows_of()
    anchor = anchor_of(model, 1.0, has_fisher=False)
    next(iter(anchor._origins.values())).fill_(math.inf)
    before = {name: one.clone() for name, one in model.named_parameters()}
    work, optimizer = Work(rows, [slice(0, ROWS)], ROWS * LENGTH), torch.optim.SGD(model.parameters())
    found = run_here(step_of, anchor, model, optimizer, work, clip_norm=1.0)
    assert not found.updated
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_the_fisher_is_that_of_a_plain_loop(tiny: Config) -> None:
    from springtide.stream import open_data

    data = open_data(tiny.data)
    rows = list(training_rows(data, tiny.num_steps, 10 * data.sequence_length))
    assert len(rows) == 10
    assert len({tuple(row.tolist()) for row in rows}) == 10
    torch.manual_seed(20)
    model = build(tiny.model, data.vocab_size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    expected = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for row in rows:
        logits = model(row[None, :-1].abs())[0]
        loss = torch.nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient**2
    found, tokens = fisher_information(model, iter(rows))
    assert tokens == 10 * data.sequence_length
    assert found.keys() == {plain_name(name) for name in expected}
    for name, one in expected.items():
        torch.testing.assert_close(found[plain_name(name)], one / tokens, rtol=1e-4, atol=1e-9)
        assert not what_is_bad(found[plain_name(name)])


def test_no_fisher_of_nothing_or_of_what_is_not_finite() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="tokens = 0"):
        fisher_information(model, iter([~rows_of()[0].abs()]))
    next(one for one in model.parameters() if one.requires_grad).data.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        fisher_information(model, iter(rows_of().abs()))


def test_the_estimate_knows_of_the_copies() -> None:
    config = Config().override({**SHAPE, "model.dim": 64, "model.ffn_dim": 160, "stream.global_batch": 2})
    config = config.override({"train.micro_batch": 1, "shards.sequence_length": 16, "train.start_from": "runs/a"})
    # a vocabulary that makes the weights most of what there is
    plain, l2sp, fisher = (
        predicted_bytes(config.override({"objective.anchor": anchor}), 20_000, None, 2)
        for anchor in ("", "l2sp", "runs/fisher")
    )
    shard = 4 * 20_000 * 64 / 2
    assert l2sp - plain == pytest.approx(shard, rel=0.3)
    assert fisher - plain == pytest.approx(2 * shard, rel=0.3)
