"""The order of samples, over random shapes: a batch does not know the world size, and no row comes twice in an epoch."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.errors import CorpusError
from springtide.stream import Order, digest
from springtide.stream.deal import Deal, floor_sum
from springtide.stream.order import CorpusOrder, corpus_and_row
from springtide.stream.permute import mix, permutation


@st.composite
def orders(draw: st.DrawFn, corpora: int = 3) -> Order:
    lanes = draw(st.integers(1, 12))
    global_batch = lanes * draw(st.integers(1, 4))
    groups = st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda rows: sum(rows) >= global_batch)
    group_rows = tuple(map(tuple, draw(st.lists(groups, min_size=1, max_size=corpora))))
    weights = st.tuples(*[st.floats(0, 1) for _ in group_rows]).filter(lambda w: sum(w) > 0.01)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=2)))]
    return Order(
        manifests=tuple(f"digest-{number}" for number in range(len(group_rows))),
        group_rows=group_rows,
        seed=draw(st.integers(0, 2**32)),
        global_batch=global_batch,
        lanes=lanes,
        window=draw(st.integers(1, 50)),
        schedule=tuple((start, draw(weights)) for start in starts),
        skip=tuple(draw(st.sets(st.integers(0, 50), max_size=5))),
    )


@given(orders(), st.integers(0, 200), st.data())
def test_the_ranks_of_any_world_size_share_out_exactly_the_batch(order: Order, step: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, order.lanes))
    parts = [order.rank_batch(step, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(parts), order.batch(step))
    assert len(order.batch(step)) == order.global_batch


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
    order = dataclasses.replace(order, skip=(), schedule=((0, (1.0,)),))
    rows = sum(order.group_rows[0])
    steps = rows // order.lanes // order.rows_per_lane
    seen = np.concatenate([order.batch(step) for step in range(epoch * steps, (epoch + 1) * steps)])
    assert len(np.unique(seen)) == len(seen)
    assert seen.max() < rows
    assert rows - len(seen) < order.lanes * (1 + order.rows_per_lane)
    assert order.epoch(epoch * steps) == epoch


@given(orders())
def test_a_mixture_gives_every_row_at_most_once_an_epoch_of_its_lane(order: Order) -> None:
    order = dataclasses.replace(order, skip=())
    drawn: dict[tuple[int, int], list[int]] = {}
    for step in range(40):
        for lane in range(order.lanes):
            corpora, rows = corpus_and_row(order.samples(step, range(lane, lane + 1)))
            for corpus, row in zip(corpora.tolist(), rows.tolist(), strict=True):
                drawn.setdefault((lane, corpus), []).append(row)
    for (_, corpus), rows_drawn in drawn.items():
        epoch = order._corpora[corpus].draws_per_epoch
        for start in range(0, len(rows_drawn), epoch):
            part = rows_drawn[start : start + epoch]
            assert len(set(part)) == len(part)


@given(orders(), st.integers(0, 10**12))
def test_seeking_far_is_as_good_as_walking(order: Order, step: int) -> None:
    far = order.batch(step)
    again = pickle.loads(pickle.dumps(order)).batch(step)
    assert np.array_equal(far, again)


@given(orders(), st.integers(0, 60))
def test_skipped_steps_are_jumped_over_and_nothing_else_moves(order: Order, step: int) -> None:
    plain = dataclasses.replace(order, skip=())
    kept = [number for number in range(120) if number not in order.skip]
    assert np.array_equal(order.batch(step), plain.batch(kept[step]))


@given(st.integers(1, 40), st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 10**6))
def test_every_step_holds_its_share_of_each_corpus_to_within_one_sample(
    slots: int, weights: list[float], step: int
) -> None:
    counts = np.bincount(Deal(slots, ((0, tuple(weights)),)).corpora(step), minlength=len(weights))
    wanted = slots * np.array(weights) / sum(weights)
    assert np.all(np.abs(counts - wanted) < 1 + 1e-6)


@given(orders(), st.integers(0, 30))
def test_draws_counted_by_floor_sums_are_those_dealt(order: Order, step: int) -> None:
    deal = order._deal
    for slot in range(min(order.global_batch, 3)):
        dealt = [int(deal.corpora(before)[slot]) for before in range(step)]
        assert deal.drawn(slot, step) == [dealt.count(corpus) for corpus in range(deal.num_corpora)]


@given(st.integers(0, 60), st.integers(0, 99), st.integers(-99, 99), st.integers(1, 50))
def test_floor_sum_is_the_sum(n: int, a: int, b: int, m: int) -> None:
    assert floor_sum(n, a, b, m) == sum((a * i + b) // m for i in range(n))


@given(st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_a_permutation_permutes(key: int, size: int) -> None:
    assert sorted(permutation(key, size).tolist()) == list(range(size))


def test_hashes_and_orders_are_the_same_on_every_machine() -> None:
    """Golden values: a change here would silently change what every saved run trains on."""
    assert mix(np.arange(2, dtype=np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]
    order = Order(("d",), ((30, 30, 4), (20,)), 7, 8, 4, 5, ((0, (0.75, 0.25)),), (2,))
    assert order.identity == "a28349027d50e0b80625510fcec742fd"
    assert [f"{digest(order.batch(step)):016x}" for step in (0, 2, 10**9)] == [
        "cf081b87136176ea",
        "be45d906bca9b875",
        "72ed0b1080247289",
    ]


@given(orders())
def test_the_identity_changes_with_anything_that_changes_a_batch(order: Order) -> None:
    others = [
        dataclasses.replace(order, seed=order.seed + 1),
        dataclasses.replace(order, window=order.window + 1),
        dataclasses.replace(order, manifests=(*order.manifests[:-1], "other")),
        dataclasses.replace(order, global_batch=order.global_batch * 2, lanes=order.lanes),
        dataclasses.replace(order, skip=(*order.skip, 99)),
        dataclasses.replace(order, schedule=(*order.schedule, (99, order.schedule[0][1]))),
    ]
    assert len({order.identity, *(other.identity for other in others)}) == 1 + len(others)


@given(st.lists(st.integers(0, 2**63), max_size=20), st.randoms())
def test_a_digest_does_not_depend_on_the_order_and_parts_add_up(ids: list[int], random: object) -> None:
    values = np.array(ids, dtype=np.uint64)
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digest(values) == digest(shuffled) == (digest(values[:5]) + digest(values[5:])) % 2**64


def test_a_batch_larger_than_the_corpus_is_refused_with_both_figures() -> None:
    with pytest.raises(CorpusError, match=r"stream.global_batch = 16: is more than the 15 rows"):
        CorpusOrder(0, 0, (15,), 8, 2, 4)
