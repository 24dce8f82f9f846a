"""The average of the weights, against the weighted mean written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from springtide.checkpoint.averages import AVERAGE, MissingAverage, as_weights, begin_averages, match_averages
from springtide.checkpoint.format import Piece
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.model import build, num_parameters
from springtide.optim.average import averaged_weights, set_newest_share
from springtide.optim.build import optimizer_of
from springtide.optim.parameter_groups import freeze
from springtide.optim.schedule import set_learning_rate
from springtide.planning.step_memory import predicted_bytes
from springtide.training.weight_average import newest_share

STEPS = 6


@pytest.fixture
def config(tiny: Config) -> Config:
    """A batch that grows from 4 to 12 rows after two steps; the half-life is that of one and a half large batches."""
    length = tiny.shards.sequence_length
    return tiny.override(
        {
            "stream.lanes": 4,
            "stream.ramp": [{"rows": 4, "until_tokens": 2 * 4 * length}],
            "optim.ema_half_life": 18 * length,
            "optim.groups": [{"match": "blocks.0.attention.*", "frozen": True}],
        }
    )


@pytest.mark.parametrize("kind", ["adamw", "muon", "lamb"])
def test_the_average_halves_with_age_in_tokens(config: Config, kind: str) -> None:
    """It is the mean of all weights that halves with their age in tokens."""
    config = config.override({"optim.optimizer": kind})
    torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # whose step has hooks of its own from now on, also in Muon's
    model = build(config.model, 64)
    freeze(model, config.optim)
    optimizer = optimizer_of(model, config.optim)
    generator = torch.Generator().manual_seed(1)
    seen: dict[str, list[np.ndarray]] = {name: [] for name, _ in model.named_parameters()}
    for step in range(1, STEPS + 1):
        for one in model.parameters():
            one.grad = torch.randn(one.shape, generator=generator) if one.requires_grad else None
        set_learning_rate(optimizer, 0.01)
        set_newest_share(optimizer, newest_share(config, StepsDone(step)))
        optimizer.step()
        for name, one in model.named_parameters():
            seen[name].append(one.detach().double().numpy().copy())
    sizes = [config.tokens_after(step) - config.tokens_after(step - 1) for step in range(1, STEPS + 1)]
    assert len(set(sizes)) > 1
    half_life = int(config.optim.ema_half_life)
    # each token's weights count half as much as those of a token that is a half-life newer
    age = [
        config.tokens_after(STEPS) - np.arange(config.tokens_after(n - 1), config.tokens_after(n))
        for n in range(1, STEPS + 1)
    ]
    shares = np.array([np.sum(0.5 ** (each / half_life)) for each in age])
    shares /= shares.sum()
    with averaged_weights(model, optimizer) as exist:
        assert exist
        for name, one in model.named_parameters():
            expected = np.tensordot(shares, np.stack(seen[name]), 1)
            np.testing.assert_allclose(one.detach().double().numpy(), expected, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, one in model.named_parameters():
        assert np.array_equal(one.detach().double().numpy(), seen[name][-1]), f"{name} is not what it was"
        assert (AVERAGE in optimizer.state.get(one, ())) == one.requires_grad


def test_weights_come_back_after_an_error(config: Config) -> None:
    """Weights come back after an error and without an average nothing moves."""
    model = build(config.model, 64)
    optimizer = optimizer_of(model, config.optim)
    with averaged_weights(model, optimizer) as exist:
        assert not exist
    weight = model.embedding.weight
    for step in (1, 2):
        weight.grad = torch.ones_like(weight)
        set_newest_share(optimizer, newest_share(config, StepsDone(step)))
        optimizer.step()
    before = weight.detach().clone()

    def evaluation() -> None:
        with averaged_weights(model, optimizer):
            assert not torch.equal(weight, before)
            raise ValueError("evaluation")

    with pytest.raises(ValueError, match="evaluation"):
        evaluation()
    assert torch.equal(weight, before)


def piece(name: str) -> Piece:
    return Piece(name, "F32", (2,), (0,), (2,), "file", 0, 8, ("",))


def test_checkpoints_with_and_without_averages_fit_either_run() -> None:
    """A checkpoint with or without averages fits a run without or with them."""
    names = ["model/a", "optim/a/exp_avg", "model/table"]
    without, both = [piece(name) for name in names], [piece(name) for name in [*names, "optim/a/ema"]]
    tensors = {one.tensor: torch.full((2,), float(place)) for place, one in enumerate(both)}
    few = {one.tensor: tensors[one.tensor] for one in without}
    assert match_averages(both, tensors) == (both, tensors, {})
    assert match_averages(both, few) == (without, few, {})
    assert match_averages(without, tensors) == (without, few, {"optim/a/ema": tensors["optim/a/ema"]})
    begin_averages({"optim/a/ema": tensors["optim/a/ema"]}, tensors)
    assert torch.equal(tensors["optim/a/ema"], tensors["model/a"])
    assert [(one.tensor, one is both[2]) for one in as_weights(both)] == [("model/a", False), ("model/table", True)]
    with pytest.raises(MissingAverage, match=r"optim\.ema_half_life .* 0\b"):
        as_weights(without)


def test_the_memory_estimate_counts_the_average(tiny: Config) -> None:
    """The memory estimate counts the average and no state of what is frozen."""

    def peak(**changes: object) -> int:
        config = tiny.override({f"optim.{name}": value for name, value in changes.items()})
        return predicted_bytes(config, 256, None, 1)

    plain, own = peak(), build(tiny.model, 256)
    parameters = num_parameters(own)
    frozen = sum(one.numel() for one in own.blocks.parameters())
    largest = max(one.numel() for one in own.parameters())
    assert 4 * parameters <= peak(ema_half_life=1000) - plain <= 4 * (parameters + largest)
    # two moments and a gradient
    assert plain - peak(groups=[{"match": "blocks.*", "frozen": True}]) >= 12 * frozen
