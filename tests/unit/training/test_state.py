"""The state between two steps: whatever happens to a run, its chain is that of its steps."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import result_of
from torch import nn

from springtide.checkpoint.format import Manifest, Meta
from springtide.checkpoint.restore import Restored
from springtide.config import Config, code_fingerprint
from springtide.config.steps import OrderStep, StepsDone
from springtide.distributed import World
from springtide.model import whole
from springtide.stream import Data, digest, open_data
from springtide.stream.chain import next_chain
from springtide.training.evaluate import Evaluations
from springtide.training.state import TrainState

SKIPPED = {3, 4, 9}
"""Steps of the order whose update is skipped."""
STEPS = 16


class Group:
    """A worker group of ``size`` ranks that continues from ``found``; only its model does not change."""

    def __init__(self, config: Config, data: Data, size: int, model: nn.Module, found: Meta | None = None) -> None:
        self.config, self.data, self.size = config, data, size
        self.state = TrainState(model, torch.optim.SGD(model.parameters()), "c")
        self.evaluations = Evaluations(config, lambda: data, World(0, size, torch.device("cpu")), self.state)
        self.go_to(found)

    def go_to(self, found: Meta | None) -> None:
        """Roll back."""
        if found is None:
            self.state.begin(self.config, self.data)
        else:
            self.state.resume(Restored(found, "found"))
        self.evaluations.begin(Restored(found, "found") if found else None)

    def train(self) -> None:
        """One step: the sum of what each rank has."""
        order = self.data.order
        step = order.step_after(self.state.step)
        parts = [order.rank_batch(step, rank, self.size) for rank in range(self.size)]
        sums = sum(digest(part) for part in parts) % 2**64
        tokens = sum(map(len, parts)) * self.data.sequence_length
        updated = step not in SKIPPED
        self.state.advance(step, result_of(tokens=tokens, digest=sums, updated=updated))

    def saved(self) -> Meta:
        """What a checkpoint and a snapshot hold."""
        meta = self.evaluations.describe(self.state.meta(self.data, World(0, self.size, torch.device("cpu")), {}))
        written = Manifest(term=1, meta=meta, config={}, files={}, size_bytes=0).model_dump_json()
        read = Manifest.model_validate_json(written).meta
        assert pickle.loads(pickle.dumps(meta)) == read == meta
        return read


@pytest.fixture
def model(tiny: Config) -> nn.Module:
    data = open_data(tiny.data)
    return whole(tiny.model, data.vocab_size, data.eos_id)


def uninterrupted(config: Config, data: Data, model: nn.Module, steps: int) -> list[Meta]:
    """What a group that nothing happens to saves after each step."""
    group, found = Group(config, data, 1, model), []
    for _ in range(steps):
        group.train()
        found.append(group.saved())
    return found


ACTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 4)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.sampled_from(["killed", "resized"]), st.integers(1, 5)),
    st.tuples(st.just("rolled back"), st.just(0)),
)


def test_the_chain_is_that_of_the_steps_whatever_happens(tiny: Config, model: nn.Module) -> None:
    data = open_data(tiny.data)
    expected: list[tuple[str, tuple[int, ...]]] = [("", ())]
    for step in range(STEPS):
        batch = data.order.batch(OrderStep(step))
        tokens, updated = len(batch) * data.sequence_length, step not in SKIPPED
        chain = next_chain(expected[-1][0], OrderStep(step), digest(batch), tokens, updated)
        expected.append((chain, tuple(one for one in sorted(SKIPPED) if one <= step)))

    @settings(max_examples=40)
    @given(acts=st.lists(ACTS, max_size=12))
    def check(acts: list[tuple[str, int]]) -> None:
        group, newest = Group(tiny, data, 1, model), None
        for act, number in acts:
            for _ in range(number if act == "train" else 0):
                if group.state.step < STEPS:
                    group.train()
            if act in ("save", "resized"):
                newest = group.saved()
            if act in ("killed", "resized"):
                group = Group(tiny, data, number, model, newest)
            if act == "rolled back":
                group.go_to(newest)
            assert (group.state.chain, group.state.skipped_updates) == expected[group.state.step]

    check()


def test_a_skipped_step_of_the_order_is_another_history(tiny: Config, model: nn.Module) -> None:
    data = open_data(tiny.data)
    plain = uninterrupted(tiny, data, model, 8)
    skipping = uninterrupted(tiny, data.skipping([OrderStep(5)]), model, 8)
    same = [one.chain == other.chain for one, other in zip(plain, skipping, strict=True)]
    assert same == [True] * 5 + [False] * 3


def test_a_trajectory_that_is_gone_back_from_takes_its_evaluations_with_it(tiny: Config, model: nn.Module) -> None:
    group = Group(tiny, open_data(tiny.data), 1, model)
    saves = {}
    for step in (1, 2):
        group.train()
        group.evaluations.losses[group.state.step] = 3.0 - step
        saves[step] = group.saved()
    group.go_to(saves[1])
    assert group.evaluations.losses == {1: 2.0}
    group.train()
    assert "heldout_loss" not in group.saved().metrics
    group.go_to(None)
    assert group.evaluations.losses == {}


def test_a_model_from_elsewhere_was_saved_by_no_code_of_ours(tiny: Config) -> None:
    """An import has no fingerprint; the line about other code named an empty one."""
    meta = Meta(step=StepsDone(1), tokens=1, world_size=1, order_identity="o", config_fingerprint="c")

    def remark(code: str) -> str:
        return Restored(meta.model_copy(update={"code_fingerprint": code}), "a").remark

    assert (remark(""), remark(code_fingerprint())) == ("", "")
    assert remark("0" * 16).startswith("saved by springtide's code 0")
