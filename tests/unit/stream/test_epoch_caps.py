"""Caps on epochs: exact, by weight, and known before the run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prepared import prepare, small, write_corpus

from springtide.config import Config
from springtide.config.data import Ramp
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError
from springtide.stream import Order, open_data
from springtide.stream.data import CapsTooSmall, capped

WEIGHTS = st.lists(st.floats(0.001, 100), min_size=2, max_size=6)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Order, int, dict[int, int]]:
    """An order with tables of weights and a batch ramp, steps, and limits for some of its corpora."""
    sizes = draw(st.lists(st.integers(1, 400), min_size=2, max_size=6))
    starts = sorted(draw(st.sets(st.integers(1, 60), max_size=2)))
    weights = st.lists(st.floats(0, 100, allow_subnormal=False), min_size=len(sizes), max_size=len(sizes)).filter(any)
    schedule = tuple((start, tuple(draw(weights))) for start in (0, *starts))
    ramp = draw(st.sampled_from([(), ((0, 4), (7, 12)), ((0, 8), (30, 4), (50, 12))]))
    digests = tuple(map(str, range(len(sizes))))
    rows = tuple((size,) for size in sizes)
    order = Order(digests, rows, seed=1, global_batch=12, lanes=4, window=3, schedule=schedule, ramp=ramp)
    capped_ones = draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    limits = {corpus: int(draw(st.floats(0.1, 8)) * sizes[corpus]) for corpus in capped_ones}
    return order, draw(st.integers(1, 120)), limits


@given(runs())
def test_no_corpus_is_drawn_more_often_than_its_cap(run: tuple[Order, int, dict[int, int]]) -> None:
    order, steps, limits = run
    ramp = Ramp(order.ramp or ((0, order.global_batch),))
    try:
        schedule = capped(order.schedule, ramp, steps, limits)
    except CapsTooSmall as error:
        _check_nobody_is_left(order, limits, error)
        return
    drawn = dataclasses.replace(order, schedule=schedule).drawn(StepsDone(steps))
    assert drawn.sum() == ramp.before(steps)
    assert all(drawn[corpus] <= limit for corpus, limit in limits.items())
    before = order.drawn(StepsDone(steps))
    if all(before[corpus] <= limit for corpus, limit in limits.items()):
        assert (np.abs(drawn - before) <= 2 * len(before) * len(order.schedule)).all()
    for (start, weights), (begin, found) in zip(order.schedule, schedule, strict=True):
        assert start == begin
        pairs = list(zip(weights, found, strict=True))
        assert not any(one for weight, one in pairs if not weight)
        ratios = [one / weight for corpus, (weight, one) in enumerate(pairs) if corpus not in limits and weight]
        assert max(ratios, default=0) <= min(ratios, default=0) * (1 + 1e-9), "by their weights"


def _check_nobody_is_left(order: Order, limits: dict[int, int], error: CapsTooSmall) -> None:
    weights = next(weights for start, weights in reversed(order.schedule) if start <= error.step)
    assert all(not weight or corpus in limits for corpus, weight in enumerate(weights))
    assert error.allowed < error.wanted


@given(WEIGHTS, st.integers(50, 400), st.data())
def test_a_cap_that_binds_is_used_up(weights: list[float], steps: int, data: st.DataObject) -> None:
    """With one table, a corpus above its cap gets it, but for two steps' rows at most: shares of a step are whole rows."""
    total, shares = steps * 16, [weight / math.fsum(weights) for weight in weights]
    corpus = data.draw(st.sampled_from(range(len(weights))))
    assume(shares[corpus] * total > 20)
    limit = int(shares[corpus] * total * data.draw(st.floats(0.3, 0.9)))
    [(_, found)] = capped(((0, tuple(weights)),), Ramp(((0, 16),)), steps, {corpus: limit})
    assert limit - 2 * 16 <= found[corpus] <= limit + 1e-6
    assert math.fsum(found) == pytest.approx(total)


def test_caps_that_do_not_bind_change_nothing() -> None:
    schedule = ((0, (1.0, 3.0)), (5, (1.0, 0.0)))
    assert capped(schedule, Ramp(((0, 8),)), 20, {0: 10_000, 1: 10_000}) == schedule


@pytest.fixture
def three(tmp_path: Path) -> Config:
    for seed, name in enumerate(("web", "wiki", "code")):
        write_corpus(tmp_path / name, 200 // (seed + 1), seed=seed)
    sources = {name: str(tmp_path / name) for name in ("web", "wiki", "code")}
    config = small(tmp_path / "data", tmp_path, corpus__sources=sources, stream__max_epochs=100)
    return prepare(config.override({"train.total": 3000 * 12 * 16, "optim.warmup": 0}))


def test_caps_name_sources_and_hold_before_and_after(three: Config) -> None:
    weights = [{"shares": {"web": 1, "wiki": 1, "code": 2}}]
    config = three.override({"stream.weights": weights, "stream.epoch_caps": {"code": 1.5}})
    steps = config.num_steps
    free, capped_ = (open_data(one.data) for one in (three.override({"stream.weights": weights}), config))
    assert free.drawn(steps)["code"].epochs > 3
    found = capped_.drawn(steps)
    assert 1.49 < found["code"].epochs <= 1.5
    assert abs(found["web"].rows - found["wiki"].rows) <= 2
    assert sum(one.rows for one in found.values()) == steps * config.stream.global_batch
    assert capped_.order.identity != free.order.identity


def test_caps_that_cannot_be_kept_are_refused(three: Config) -> None:
    for caps, message in (
        ({"wob": 1}, r"stream.epoch_caps = 'wob': is not a corpus of this run; did you mean 'web'"),
        ({"web": 0}, r"stream.epoch_caps.web = 0"),
        (
            {"web": 0.1, "wiki": 0.1, "code": 0.1},
            r"leave [\d,]+ tokens of the 576,000 that are drawn from step 0 on; raise",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            open_data(three.override({"stream.epoch_caps": caps}).data)


def test_a_source_read_too_often_is_refused_with_numbers(three: Config) -> None:
    """A run that reads a source too often is refused with the numbers."""
    config = three.override({"stream.weights": [{"shares": {"web": 1, "wiki": 1, "code": 2}}]})
    data = open_data(config.data)
    data.check_epochs(config.num_steps)
    epochs = {name: one.epochs for name, one in data.drawn(config.num_steps).items()}
    limited = open_data(config.override({"stream.max_epochs": 2}).data)
    over = {name: one for name, one in epochs.items() if one > 2}
    assert "code" in over
    with pytest.raises(ConfigError, match=r"stream\.max_epochs = 2\.0") as refused:
        limited.check_epochs(config.num_steps)
    for name, one in epochs.items():
        assert (f"{name} {one:.1f} times" in str(refused.value)) == (name in over)
    most = str(refused.value).rpartition("stream.max_epochs to ")[2]
    open_data(config.override({"stream.max_epochs": float(most)}).data).check_epochs(config.num_steps)
