"""The order of samples, over random shapes: a batch does not know the world size, and every row comes once before any comes
twice."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.config.data import Ramp
from springtide.storage.digest import mix
from springtide.stream import Order, digest
from springtide.stream.chain import corpus_and_row
from springtide.stream.corpus_order import CorpusOrders, keys, permutation, permuted, spread
from springtide.stream.mixture import MixtureSchedule, floor_sum


@st.composite
def orders(draw: st.DrawFn, corpora: int = 3) -> Order:
    lanes = draw(st.integers(1, 12))
    global_batch = lanes * draw(st.integers(1, 4))
    groups = st.lists(st.integers(1, 40), min_size=1, max_size=12)
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


def by_corpus(order: Order, steps: Iterable[int]) -> list[list[list[int]]]:
    """The rows that each step draws from each corpus: by corpus, then step."""
    found: list[list[list[int]]] = [[] for _ in order.group_rows]
    for step in steps:
        corpora, rows = corpus_and_row(order.batch(step))
        for corpus, drawn in enumerate(found):
            drawn.append(rows[corpora == corpus].tolist())
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


@pytest.mark.parametrize("lanes", [4, 512])
@pytest.mark.parametrize("rows", [1, 400, 1000, 1500, 10_000])
def test_a_small_corpus_of_a_large_mixture_is_seen_whole(rows: int, lanes: int) -> None:
    """Found at 5% of 512: 619 of 1,000 rows after 768 draws, and 400 rows refused."""
    order = Order(("big", "small"), ((256,) * 400, (rows,)), 3, 512, lanes, 512, ((0, (0.95, 0.05)),))
    steps = -(-rows // 25) + 1
    by_step = by_corpus(order, range(steps))[1]
    within = int(np.searchsorted(np.cumsum([len(one) for one in by_step]), rows, side="right"))
    seen = list(itertools.chain(*by_step[:within]))
    assert rows - 26 <= len(set(seen)) == len(seen)
    assert len(set(itertools.chain(*by_step))) == rows
    assert order.epochs(steps)[1] == sum(map(len, by_step)) / rows


def test_a_corpus_of_weight_zero_may_have_one_row() -> None:
    order = Order(("trained on", "evaluated on"), ((64,), (1,)), 3, 16, 16, 512, ((0, (1.0, 0.0)),))
    assert sorted(np.concatenate([order.batch(step) for step in range(4)])) == list(range(64))
    assert order.drawn(4).tolist() == [64, 0]


@given(orders())
def test_every_row_comes_once_before_any_twice_and_in_the_same_order_in_smaller_batches(order: Order) -> None:
    """Whatever the lanes, the mixture, its changes, the ramp and the sizes: also of a corpus of one row."""
    order = dataclasses.replace(order, skip=(), skip_samples=())
    found, plain = by_corpus(order, range(90)), by_corpus(dataclasses.replace(order, ramp=()), range(90))
    assert [sum(map(len, of_step)) for of_step in zip(*found, strict=True)] == [order.rows(step) for step in range(90)]
    for ramped, one, groups in zip(found, plain, order.group_rows, strict=True):
        times = np.zeros(sum(groups), dtype=int)
        for rows in ramped:
            np.add.at(times, rows, 1)
            assert times.max() - times.min() <= 1
        ends = np.cumsum([len(step) for step in one]).tolist()
        drawn, expected = list(itertools.chain(*ramped)), list(itertools.chain(*one))
        for end in set(ends) & set(np.cumsum([len(step) for step in ramped]).tolist()):
            assert sorted(drawn[:end]) == sorted(expected[:end])


@given(orders(), st.integers(0, 90), st.integers(0, 90))
def test_what_was_drawn_before_a_step_is_counted_as_it_was_dealt(order: Order, first: int, steps: int) -> None:
    """Also over changes of weights and of the batch in the middle."""
    dealt = [np.bincount(order.corpora(step), minlength=len(order.group_rows)) for step in range(first, first + steps)]
    assert order._draws.counts(first, first + steps).tolist() == sum(dealt, np.zeros(len(order.group_rows))).tolist()


@given(orders(), st.integers(0, 60))
def test_what_a_run_will_read_is_known_before_it_starts(order: Order, done: int) -> None:
    order = dataclasses.replace(order, skip_samples=())
    trained = [sum(map(len, drawn)) for drawn in by_corpus(order, [order.step_after(one) for one in range(done)])]
    assert order.drawn(done).tolist() == trained
    rows = [sum(groups) for groups in order.group_rows]
    assert order.epochs(done).tolist() == [drawn / of for drawn, of in zip(trained, rows, strict=True)]


def test_a_row_group_is_read_in_a_bounded_stretch_of_the_draws() -> None:
    """The bound of the read-ahead, and of what a cache must keep."""
    groups, rows, window, lanes = 240, 16, 24, 4
    orders = CorpusOrders(5, [(rows,) * groups], lanes, window)
    columns = int(orders.columns[0])
    for epoch in range(3):
        draws = np.arange(groups * rows) + epoch * groups * rows
        group = orders.draw(np.zeros_like(draws), draws) // rows
        column = draws % (groups * rows) % columns
        stretches = [draws[(group == one) & (column == other)] for one in range(groups) for other in range(columns)]
        assert sum(len(stretch) > 0 for stretch in stretches) < groups + columns
        longest = max(np.ptp(stretch) for stretch in stretches if len(stretch))
        assert longest < (rows + 2 * window) * columns
    assert columns == lanes


@pytest.mark.parametrize("world_size", [1, 3, 8, 64])
def test_a_rank_reads_its_own_part_of_a_corpus(world_size: int) -> None:
    """With one corpus no row group is read by two ranks, but those where two columns meet."""
    order = Order(("d",), ((64,) * 640,), 3, 128, 64, 256)
    steps = 640 * 64 // 128
    read = [
        np.unique(np.concatenate([order.rank_batch(step, rank, world_size) for step in range(steps)]) // 64)
        for rank in range(world_size)
    ]
    assert sum(map(len, read)) <= 640 + 64


def test_lanes_of_a_mixture_read_near_their_own_columns() -> None:
    """A rank of eight opens little more than an eighth of the row groups; two thirds, if lanes took the draws as they come."""
    order = Order(("d", "e"), ((64,) * 640, (64,) * 640), 3, 128, 64, 256, ((0, (0.37, 0.63)),))
    read = np.unique(np.concatenate([order.rank_batch(step, 3, 8) for step in range(320)]) // 64)
    assert len(read) < 1280 / 5


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


@given(st.integers(0, 60), st.integers(0, 99), st.integers(-99, 99), st.integers(1, 50))
def test_floor_sum_is_the_sum(n: int, a: int, b: int, m: int) -> None:
    assert floor_sum(n, a, b, m) == sum((a * i + b) // m for i in range(n))


@given(st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_a_permutation_permutes(key: int, size: int) -> None:
    assert sorted(permutation(keys(key), size).tolist()) == list(range(size))
    assert sorted(permuted(np.full(size, key, np.uint64), np.arange(size), np.full(size, size))) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 33, 300])
def test_places_are_permuted_evenly(size: int) -> None:
    """Over many keys each place is as likely as any other, and neighbours do not stay together."""
    tries = 200 * size
    key = keys(np.arange(tries))
    first, second = (permuted(key, np.full(tries, place), np.full(tries, size)) for place in (0, 1))
    for found in (first, second):
        assert ((np.bincount(found, minlength=size) - 200) ** 2).sum() / 200 < size + 6 * size**0.5
    assert abs(np.mean(second == first + 1) - 1 / size) < 5 * (1 / size / tries) ** 0.5


@given(st.integers(1, 5000))
def test_a_spread_is_a_permutation(size: int) -> None:
    assert len(set((np.arange(size) * spread(size) % size).tolist())) == size


def test_hashes_and_orders_are_the_same_on_every_machine() -> None:
    """Golden values: a change here would silently change what every saved run trains on."""
    assert mix(np.arange(2, dtype=np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]
    order = Order(("d", "e"), ((30, 30, 4), (20,)), 7, 8, 4, 5, ((0, (0.75, 0.25)),), (2,))
    assert order.identity == "b2d1e23e2ad0e699700da9653a5e4f33"
    assert [f"{digest(order.batch(order.step_after(done))):016x}" for done in (0, 2, 10**9)] == [
        "a6b9bad847063774",
        "a23959166ffe2130",
        "dd80a86c3a99a544",
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


@st.composite
def uneven(draw: st.DrawFn) -> tuple[float, ...]:
    """Weights that sums round, some of them zero, the last one not."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = random.random(draw(st.integers(1, 40))) * draw(st.sampled_from([1.0, 1e-6, 1e9]))
    weights[random.random(len(weights)) < draw(st.sampled_from([0.0, 0.5]))] = 0
    return *weights.tolist(), draw(st.floats(0.01, 1e9))


@given(st.sampled_from([8, 256, 2**20]), st.one_of(uneven(), st.lists(st.integers(1, 10**9), min_size=1, max_size=20)))
def test_a_table_without_zeros_at_its_end_is_cut_as_ever(slots: int, weights: Sequence[float]) -> None:
    """As in every run that was ever saved: a cut that moves by one changes the order's identity."""
    shares = np.cumsum(weights) / np.sum(weights)
    bounds = [int(share * (slots * 2**40)) for share in shares]
    assert MixtureSchedule(slots, ((0, tuple(weights)),))._cuts[0].tolist() == [*bounds[:-1], slots * 2**40]


@given(st.sampled_from([8, 256, 2**20]), uneven(), st.integers(1, 300))
def test_corpora_that_come_later_move_no_cut(slots: int, weights: tuple[float, ...], more: int) -> None:
    """numpy adds eight and more numbers in another grouping: a run that took up its sixth dataset was refused."""
    cuts = MixtureSchedule(slots, ((0, weights),))._cuts[0].tolist()
    padded = MixtureSchedule(slots, ((0, (*weights, *[0.0] * more)),))._cuts[0].tolist()
    assert padded == [*cuts, *[slots * 2**40] * more]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_takes_up_dataset_after_dataset_keeps_its_past(seed: int) -> None:
    fresh = np.random.default_rng(seed).integers(1_000, 200_000, 20).tolist()
    rows, shares, past = [900_000, 300_000], [0.7, 0.3], []
    tables = [(0, tuple(shares))]
    for now, more in zip(range(1000, 21_000, 1000), fresh, strict=True):
        padded = tuple((start, (*weights, *[0.0] * (len(rows) - len(weights)))) for start, weights in tables)
        order = Order(tuple(f"d{n}" for n in range(len(rows))), tuple((n,) for n in rows), 0, 2**16, 16, 64, padded)
        past.append(order.identity_at(now))
        assert [order.identity_at(done) for done in range(1000, now + 1, 1000)] == past
        shares.append(more * sum(shares) / sum(rows))
        rows.append(more)
        tables.append((now, tuple(shares)))


@given(orders(), st.integers(0, 60) | st.integers(0, 10**12), st.integers(1, 9))
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
