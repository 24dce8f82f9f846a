"""The order of samples, over random shapes: a batch does not know the world size, and no row comes twice in an epoch."""

from __future__ import annotations

import dataclasses
import doctest
import pickle
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.config import steps
from springtide.config.batch_schedule import Ramp
from springtide.errors import CorpusError
from springtide.stream import Order, digest
from springtide.stream import order as order_of_samples
from springtide.stream.corpus_order import CorpusOrder
from springtide.stream.mixture import MixtureSchedule, floor_sum
from springtide.stream.permute import mix, permutation
from springtide.stream.sample_ids import corpus_and_row


@st.composite
def orders(draw: st.DrawFn, corpora: int = 3) -> Order:
    lanes = draw(st.integers(1, 12))
    global_batch = lanes * draw(st.integers(1, 4))
    groups = st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda rows: sum(rows) >= global_batch)
    group_rows = tuple(map(tuple, draw(st.lists(groups, min_size=1, max_size=corpora))))
    weights = st.tuples(*[st.floats(0, 1) for _ in group_rows]).filter(lambda w: sum(w) > 0.01)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=2)))]
    smaller = sorted(draw(st.sets(st.integers(1, 80), max_size=2)))
    sizes = [lanes * draw(st.integers(1, global_batch // lanes)) for _ in smaller] + [global_batch]
    return Order(
        manifests=tuple(f"digest-{number}" for number in range(len(group_rows))),
        group_rows=group_rows,
        seed=draw(st.integers(0, 2**32)),
        global_batch=global_batch,
        lanes=lanes,
        window=draw(st.integers(1, 50)),
        schedule=tuple((start, draw(weights)) for start in starts),
        ramp=tuple(zip([0, *smaller], sizes, strict=True)),
        skip=tuple(draw(st.sets(st.integers(0, 50), max_size=5))),
        skip_samples=tuple(
            (start, (draw(st.integers(0, 60)),)) for start in draw(st.sets(st.integers(0, 40), max_size=2))
        ),
    )


def by_lane_and_corpus(order: Order, steps: int) -> dict[tuple[int, int], list[int]]:
    """What each lane draws from each corpus, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    for step in range(steps):
        for lane, ids in enumerate(order.batch(step).reshape(order.lanes, -1)):
            corpora, rows = corpus_and_row(ids)
            for corpus, row in zip(corpora.tolist(), rows.tolist(), strict=True):
                found.setdefault((lane, corpus), []).append(row)
    return found


@given(orders(), st.integers(0, 200), st.data())
def test_the_ranks_of_any_world_size_share_out_exactly_the_batch(order: Order, step: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, order.lanes))
    parts = [order.rank_batch(step, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(parts), order.batch(step))
    whole = dataclasses.replace(order, skip_samples=())
    left_out = {sample for start, ids in order.skip_samples if start <= step for sample in ids}
    assert len(whole.batch(step)) == order.rows(step)
    assert order.batch(step).tolist() == [sample for sample in whole.batch(step).tolist() if sample not in left_out]


@given(st.integers(1, 64), st.data())
def test_lanes_are_owned_once_contiguously_and_evenly(lanes: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, lanes))
    order = Order(("d",), ((lanes * 4,),), 0, lanes, lanes, 8)
    owned = [order.lanes_of(rank, world_size) for rank in range(world_size)]
    assert [lane for part in owned for lane in part] == list(range(lanes))
    assert {len(part) for part in owned} <= {lanes // world_size, -(-lanes // world_size)}
    assert all(lane * world_size // lanes == rank for rank, part in enumerate(owned) for lane in part)


@given(orders(corpora=1), st.integers(0, 2))
def test_one_corpus_gives_every_row_at_most_once_an_epoch(order: Order, epoch: int) -> None:
    order = dataclasses.replace(order, skip=(), skip_samples=(), schedule=((0, (1.0,)),), ramp=())
    rows = sum(order.group_rows[0])
    steps = rows // order.lanes // order.rows_per_lane
    seen = np.concatenate([order.batch(step) for step in range(epoch * steps, (epoch + 1) * steps)])
    assert len(np.unique(seen)) == len(seen)
    assert seen.max() < rows
    assert rows - len(seen) < order.lanes * (1 + order.rows_per_lane)
    assert order.epoch(epoch * steps) == epoch


@given(orders())
def test_a_mixture_gives_every_row_at_most_once_an_epoch_of_its_lane(order: Order) -> None:
    order = dataclasses.replace(order, skip=(), skip_samples=())
    for (_, corpus), rows_drawn in by_lane_and_corpus(order, 40).items():
        epoch = order._corpora[corpus].draws_per_epoch
        for start in range(0, len(rows_drawn), epoch):
            part = rows_drawn[start : start + epoch]
            assert len(set(part)) == len(part)


@given(orders())
def test_smaller_batches_draw_the_same_rows_in_the_same_order(order: Order) -> None:
    order = dataclasses.replace(order, skip=(), skip_samples=())
    plain = by_lane_and_corpus(dataclasses.replace(order, ramp=()), 90)
    for place, rows in by_lane_and_corpus(order, 90).items():
        shared = min(len(rows), len(plain.get(place, [])))
        assert rows[:shared] == plain.get(place, [])[:shared]
    assert [len(order.batch(step)) for step in range(90)] == [order.rows(step) for step in range(90)]


@given(orders(), st.integers(0, 300))
def test_what_was_drawn_before_a_step_is_counted_as_it_was_dealt(order: Order, step: int) -> None:
    order = dataclasses.replace(order, skip=(), skip_samples=())
    dealt = [order.corpora(before).reshape(order.lanes, -1) for before in range(step)]
    counts = order._draws.counts_before(step, range(order.lanes))
    for corpus in range(len(order.group_rows)):
        expected = sum((np.sum(one == corpus, axis=1) for one in dealt), np.zeros(order.lanes))
        assert counts[:, corpus].tolist() == expected.tolist()


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 99))
def test_a_ramp_counts_rows_and_steps(lengths: list[tuple[int, int]], step: int) -> None:
    starts = np.cumsum([0, *(length for length, _ in lengths)]).tolist()
    ramp = Ramp(tuple(zip(starts, [*(rows for _, rows in lengths), 5], strict=True)))
    rows = [ramp.rows(one) for one in range(step)]
    assert ramp.before(step) == sum(rows)
    assert [
        rows for piece, begin, end in ramp.runs(0, step) for rows in [ramp.pieces[piece][1]] * (end - begin)
    ] == rows
    assert ramp.steps(sum(rows)) == step
    assert ramp.steps(sum(rows) + 1) == step + 1


@given(orders(), st.integers(0, 10**12))
def test_seeking_far_is_as_good_as_walking(order: Order, step: int) -> None:
    far = order.batch(step)
    again = pickle.loads(pickle.dumps(order)).batch(step)
    assert np.array_equal(far, again)


@given(orders(), st.integers(0, 60))
def test_skipped_steps_are_jumped_over_and_nothing_else_moves(order: Order, step: int) -> None:
    order = dataclasses.replace(order, skip_samples=())
    plain = dataclasses.replace(order, skip=())
    kept = [number for number in range(120) if number not in order.skip]
    assert order.step_after(step) == kept[step]
    assert np.array_equal(order.batch(kept[step]), plain.batch(kept[step]))
    assert step == 0 or order.step_before(step) == kept[step - 1]


def test_a_sample_is_left_out_from_its_step_on() -> None:
    order = Order(("d",), ((8,),), 0, 4, 4, 2)  # two steps an epoch: every row comes again and again
    sample = int(order.batch(5)[0])
    without = dataclasses.replace(order, skip_samples=((5, (sample,)),))
    comes = [step for step in range(20) if sample in order.batch(step)]
    assert 5 in comes
    assert min(comes) < 5
    for step in range(20):
        expected = [row for row in order.batch(step).tolist() if step < 5 or row != sample]
        assert without.batch(step).tolist() == expected


@given(st.integers(1, 40), st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 10**6))
def test_every_step_holds_its_share_of_each_corpus_to_within_one_sample(
    slots: int, weights: list[float], step: int
) -> None:
    counts = np.bincount(MixtureSchedule(slots, ((0, tuple(weights)),)).corpora(step), minlength=len(weights))
    wanted = slots * np.array(weights) / sum(weights)
    assert np.all(np.abs(counts - wanted) < 1 + 1e-6)


@given(orders(), st.integers(0, 30))
def test_draws_counted_by_floor_sums_are_those_dealt(order: Order, step: int) -> None:
    deal = order._mixtures[-1]
    for slot in range(min(order.global_batch, 3)):
        dealt = [int(deal.corpora(before)[slot]) for before in range(step)]
        assert deal.count_before(slot, step) == [dealt.count(corpus) for corpus in range(deal.num_corpora)]


@given(st.integers(0, 60), st.integers(0, 99), st.integers(-99, 99), st.integers(1, 50))
def test_floor_sum_is_the_sum(n: int, a: int, b: int, m: int) -> None:
    assert floor_sum(n, a, b, m) == sum((a * i + b) // m for i in range(n))


@given(st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_a_permutation_permutes(key: int, size: int) -> None:
    assert sorted(permutation(key, size).tolist()) == list(range(size))


def test_hashes_and_orders_are_the_same_on_every_machine() -> None:
    """Golden values: a change here would silently change what every saved run trains on."""
    assert mix(np.arange(2, dtype=np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]
    order = Order(("d", "e"), ((30, 30, 4), (20,)), 7, 8, 4, 5, ((0, (0.75, 0.25)),), (2,))
    assert order.identity == "ec943216995791c8cd0566068a6eb6d3"
    assert [f"{digest(order.batch(order.step_after(done))):016x}" for done in (0, 2, 10**9)] == [
        "cf081b87136176ea",
        "be45d906bca9b875",
        "72ed0b1080247289",
    ]


@given(orders())
def test_the_identity_changes_with_anything_that_changes_a_batch(order: Order) -> None:
    used = int(np.argmax(order.schedule[0][1]))
    manifests = tuple("other" if number == used else name for number, name in enumerate(order.manifests))
    others = [
        dataclasses.replace(order, seed=order.seed + 1),
        dataclasses.replace(order, window=order.window + 1),
        dataclasses.replace(order, manifests=manifests),
        dataclasses.replace(order, global_batch=order.global_batch * 2, lanes=order.lanes),
        dataclasses.replace(order, skip=(*order.skip, 99)),
        dataclasses.replace(order, skip_samples=(*order.skip_samples, (0, (99,)))),
        dataclasses.replace(order, schedule=(*order.schedule, (99, order.schedule[0][1]))),
    ]
    assert len({order.identity, *(other.identity for other in others)}) == 1 + len(others)


@given(orders(), st.integers(0, 60), st.data())
def test_what_comes_later_may_change_and_what_is_done_keeps_its_identity(
    order: Order, done: int, data: st.DataObject
) -> None:
    end = order.step_before(done) + 1 if done else 0
    extra = data.draw(st.integers(max(end, 1), 120).filter(lambda step: step not in dict(order.schedule)))
    weights = tuple(reversed([*order.schedule[0][1], 1.0]))
    schedule = sorted([*((start, (*old, 0.0)) for start, old in order.schedule), (extra, weights)])
    changed = dataclasses.replace(
        order,
        manifests=(*order.manifests, "later"),
        group_rows=(*order.group_rows, (order.global_batch,)),
        schedule=tuple(schedule),
        skip=(*order.skip, extra + 1),
        skip_samples=(*order.skip_samples, (extra, (1,))),
    )
    assert changed.identity_at(done) == order.identity_at(done)
    assert changed.identity != order.identity
    for step in range(end):
        assert np.array_equal(changed.batch(step), order.batch(step))
    assert changed.identity_at(extra + 3) != order.identity_at(extra + 3)


@given(orders(), st.integers(0, 60), st.integers(0, 9))
def test_walking_gives_what_seeking_gives(order: Order, first: int, steps: int) -> None:
    walked = [order.batch(step) for step in range(first, first + steps)]
    fresh = [pickle.loads(pickle.dumps(order)).batch(step) for step in range(first, first + steps)]
    assert all(np.array_equal(one, other) for one, other in zip(walked, fresh, strict=True))


@given(st.lists(st.integers(0, 2**63), max_size=20), st.randoms())
def test_a_digest_does_not_depend_on_the_order_and_parts_add_up(ids: list[int], random: object) -> None:
    values = np.array(ids, dtype=np.uint64)
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digest(values) == digest(shuffled) == (digest(values[:5]) + digest(values[5:])) % 2**64


def test_a_batch_larger_than_the_corpus_is_refused_with_both_figures() -> None:
    with pytest.raises(CorpusError, match=r"stream.global_batch = 16: is more than the 15 rows"):
        CorpusOrder(0, 0, (15,), 8, 2, 4)


@pytest.mark.parametrize("module", [order_of_samples, steps])
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert (found.attempted > 0, found.failed) == (True, 0)
