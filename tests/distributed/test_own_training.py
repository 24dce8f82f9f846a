"""An objective and an optimizer of one's own: the same bits at any world size, through resizes, and told in the journal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import every_tensor, train

from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Event, StepDone
from springtide.events.record import event as read
from springtide.events.record import record
from springtide.model import skeleton
from springtide.model.objective import Objective
from springtide.optim.build import optimizer_of
from springtide.planning.step_memory import predicted_bytes

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 6


def own(tiny: Config, name: str, **changes: Any) -> Config:
    step = tiny.tokens_per_step
    fixed = {"run.id": name, "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0}
    fixed |= {"train.total": STEPS * step, "optim.warmup": 2 * step, "train.micro_batch": 2}
    fixed |= {"optim.source": "own_training:lion", "objective.source": "own_training:entropy"}
    return tiny.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def told(events: list[Event]) -> dict[int, tuple[float, dict[str, float]]]:
    return {one.step: (one.loss, one.extra) for one in events if isinstance(one, StepDone)}


@pytest.mark.full
def test_they_are_bit_equal_at_any_world_size_and_through_a_resize(tiny: Config, ranks: Ranks) -> None:
    config = own(tiny, "own-1", optim__ema_half_life=5 * tiny.tokens_per_step)
    events = ranks(1, train, config)[0]
    expected = told(events)
    assert expected[STEPS][0] < expected[1][0]
    for loss, parts in expected.values():
        assert parts.keys() == {"objective/nats", "objective/entropy"}
        assert loss == pytest.approx(parts["objective/nats"] - 0.1 * parts["objective/entropy"], abs=1e-6)
    assert [read(record(one)) for one in events] == events
    for size in (2, 3):
        for found in ranks(size, train, own(tiny, f"own-{size}", optim__ema_half_life=5 * tiny.tokens_per_step)):
            assert told(found) == expected
    resized = config.override({"run.id": "own-resized"})
    first = told(ranks(2, train, resized, 3)[0])
    assert first | told(ranks(3, train, resized)[0]) == expected
    [state] = ranks(1, every_tensor, config)
    for other in ranks(2, every_tensor, resized):
        assert other.keys() == state.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in state.items())


@pytest.mark.full
def test_the_cross_entropy_as_an_objective_learns_what_the_built_in_one_does(tiny: Config, ranks: Ranks) -> None:
    layout = {
        "optim__source": "",
        "parallel__reduction": "fp32",
        "optim__groups": [{"match": "norm.*", "frozen": True}],
    }
    source = "springtide.model.objective:next_token"
    plain = ranks(1, train, own(tiny, "plain", objective__source="", **layout))[0]
    found = ranks(3, train, own(tiny, "as-objective", objective__source=source, **layout))[0]
    steps = [[one for one in events if isinstance(one, StepDone)] for events in (plain, found)]
    for one, other in zip(*steps, strict=True):
        assert not one.extra
        assert other.loss == pytest.approx(one.loss, abs=5e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert 0 <= other.extra["objective/accuracy"] < 1


def test_what_goes_wrong_in_training_is_told(tiny: Config, ranks: Ranks) -> None:
    for source, problem in (
        ("own_training:changes_its_names", r"returned the parts \['of_64'\], before: \['of_3'\]"),
        ("own_training:weighs_nothing", "the weight of own_training:weighs_nothing is 0.0 in all rows of a step"),
    ):
        with pytest.raises(AssertionError, match=f"TrainingFailed: .*{problem}"):
            ranks(1, train, own(tiny, "wrong", objective__source=source))
    with pytest.raises(AssertionError, match=r"state sum of .* is a plain tensor \(3,\), of a sharded parameter"):
        ranks(2, train, own(tiny, "forgets", optim__source="own_training:forgets"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("own_training:a_mean", r"returned Tensor; return \(sum, weight, parts\)"),
        ("own_training:no_gradient", "a sum that is no scalar tensor with a gradient"),
        ("own_training:a_vector", r"returned \(3, 257\) as 'each'; return a scalar"),
        ("own_training:spaces", "names a part 'a name'"),
        ("own_training:raises", "raises KeyError: 'teacher', called with 2 rows of 3 tokens"),
        ("own_training:absent", "cannot be imported"),
    ],
)
def test_an_objective_that_is_none_is_told_before_the_first_step(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"objective.source = '{source}': .*{problem}"):
        Objective(source, 257, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "returned a NoneType; return a torch.optim.Optimizer"),
        ("a_few", "leaves out parameters: embedding.weight"),
        ("others", "also holds parameters that it was not given"),
    ],
)
def test_an_optimizer_that_is_none_is_told(tiny: Config, name: str, problem: str) -> None:
    config = tiny.override({"optim.source": f"own_training:{name}"})
    with pytest.raises(ConfigError, match=f"optim.source = 'own_training:{name}': {problem}"):
        optimizer_of(skeleton(tiny.model, 257), config.optim)


def test_contradictions_are_refused_by_name(tiny: Config) -> None:
    for changes, problem in (
        ({"optim.groups": [{"match": "*", "lr_scale": 2.0}]}, "optim.groups.0.match = '*': sets a rate or a decay"),
        ({"optim.z_loss": 1e-4}, "optim.z_loss = 0.0001: is added to the cross-entropy"),
        ({"model.base_width": tiny.model.dim}, "optim.source = 'own_training:lion' needs its own scaling"),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            own(tiny, "wrong").override(changes)


def test_their_bytes_are_predicted_also_if_they_look_at_values(tiny: Config) -> None:
    lion = own(tiny, "bytes", objective__source="")
    adamw = lion.override({"optim.source": ""})
    assert predicted_bytes(lion, 257, None, 2) < predicted_bytes(adamw, 257, None, 2), "one moment, not two"
    for source in ("own_training:entropy", "own_training:looks_at_values"):
        assert predicted_bytes(lion.override({"objective.source": source}), 257, None, 2) > 0
