"""All parts -> plan: drop duplicates, order the documents, split them and cut shards.

Memory holds about 64 bytes per document and no text: keys, lengths, and one band of the signatures at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from springtide.config.data import ShardsConfig
from springtide.dataset.apart import TRAINED_ON, ApartFrom, trained_on
from springtide.dataset.near import near_duplicates_among, read_bands_of
from springtide.dataset.parts import EXAMPLES, read_columns
from springtide.errors import CorpusError, explain
from springtide.shards import HELDOUT, TRAIN, best_fit, shuffle_rows
from springtide.store import Folder


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """One shard: its documents in order, by (part, row in the part), and the tokens that it takes from them."""

    split: str
    number: int
    """In the split; the shards of a source follow one another."""
    first_row: int
    """Its number in the rows that its source has in the split."""
    rows: int
    parts: np.ndarray
    """int64 (documents,)."""
    places: np.ndarray
    """int32 (documents,): the row of each document in its part."""
    skip: int = 0
    """Tokens of the first document that come before this shard; for documents packed end to end."""
    pieces: np.ndarray | None = None
    """int32 (pieces, 4): row, document, begin and end; for documents fitted into rows, else None."""

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.parquet"


class Drop(NamedTuple):
    """A document that the plan drops."""

    reason: str
    place: tuple[int, int]
    """(part, row in the part)."""
    kept: tuple[int, int] | None
    """The document that is kept for it, if it is a duplicate."""
    similarity: float
    """Jaccard similarity of the two; 1 for equal texts."""


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """What a source has in a split."""

    source: str
    split: str
    documents: int
    tokens: int
    shards: tuple[ShardPlan, ...]
    """Empty if there is less than a row."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shards of a dataset, and counts of documents and tokens."""

    splits: tuple[SplitPlan, ...]
    """One per source and split."""
    dropped: dict[str, int]
    """Reason -> number of documents dropped by the plan."""
    examples: tuple[Drop, ...]
    """The first few documents dropped for each reason."""
    lengths: np.ndarray
    """int32: tokens of each kept document."""
    heldout_fraction: float
    """Share of the documents that is held out; smaller than the setting if that is more than ``shards.heldout_tokens``."""


def make_plan(
    work: Folder,
    parts: Sequence[int],
    sources: Sequence[str],
    settings: ShardsConfig,
    near_duplicates: bool,
    apart: ApartFrom,
) -> Plan:
    """Compute the plan from the columns of the parts with these numbers. It does not depend on how many processes made them.

    ``sources``: the source of each part; the parts of a source follow one another. A document that several sources have, or
    close copies of, goes to the first of them.
    """
    part, row, high, low, share, length = _index(work, parts)
    names = list(dict.fromkeys(sources))
    numbers = {name: number for number, name in enumerate(names)}
    source = np.array([numbers[name] for name in sources], dtype=np.int32)[np.searchsorted(parts, part)]

    def place(index: int) -> tuple[int, int]:
        return int(part[index]), int(row[index])

    order = np.lexsort((row, part, low, high))
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    dropped = {"duplicate": int(again.sum())}
    first = order[np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))]
    examples = [
        Drop("duplicate", place(order[at]), place(first[at]), 1.0) for at in np.flatnonzero(again)[:EXAMPLES].tolist()
    ]
    order = order[~again]
    if near_duplicates:
        by_source = np.argsort(source[order], kind="stable")
        first = order[by_source]
        found = near_duplicates_among(work, parts, first)
        near = found.kept != np.arange(len(order))
        dropped["near duplicate"] = int(near.sum())
        examples += [
            Drop("near duplicate", place(first[at]), place(first[found.kept[at]]), float(found.similarity[at]))
            for at in np.flatnonzero(near)[:EXAMPLES].tolist()
        ]
        is_near = np.zeros(len(order), dtype=bool)
        is_near[by_source] = near
        order = order[~is_near]
    fraction = _fraction(settings, share[order], length[order])
    held_out = _is_held_out(share[order], fraction)
    if apart.datasets:
        met = np.zeros(len(order), dtype=bool)
        met[held_out] = trained_on(np.stack(list(read_bands_of(work, parts, order[held_out]))), apart)
        dropped[TRAINED_ON] = int(met.sum())
        examples += [Drop(TRAINED_ON, place(index), None, 0.0) for index in order[met][:EXAMPLES].tolist()]
        order, held_out = order[~met], held_out[~met]
    splits: list[SplitPlan] = []
    lay = _cut if settings.packing == "concat" else _fit
    for split, mine in {TRAIN: order[~held_out], HELDOUT: order[held_out]}.items():
        mine = mine[np.argsort(source[mine], kind="stable")]
        bounds = np.searchsorted(source[mine], range(len(names) + 1))
        number = 0
        for name, (begin, end) in zip(names, itertools.pairwise(bounds.tolist()), strict=True):
            if fraction == 1 and split == TRAIN:
                break
            chosen = mine[begin:end]
            shards = tuple(lay(settings, split, number, part[chosen], row[chosen], length[chosen]))
            splits.append(SplitPlan(name, split, len(chosen), int(length[chosen].sum()), shards))
            number += len(shards)
    return Plan(tuple(splits), dropped, tuple(examples), length[order], fraction)


def check_plan(plan: Plan, settings: ShardsConfig, corpus: str) -> None:
    """Raise CorpusError if a source has nothing to train on, or there is nothing to hold out. ``corpus``: its name."""
    if not any(one.documents for one in plan.splits):
        raise CorpusError(
            explain(
                "corpus.source",
                corpus,
                "has no text left after cleaning",
                "point it at files that are not empty, or loosen corpus.min_characters and the other filters",
            )
        )
    several = len({one.source for one in plan.splits}) > 1
    for one in plan.splits:
        others = any(other.shards for other in plan.splits if other.split == one.split)
        may_be_empty = one.split == HELDOUT and plan.heldout_fraction < 1 and others
        if not one.shards and not may_be_empty:
            where = f"corpus.sources.{one.source}" if several else repr(corpus)
            problem = f"the {one.split} split of {where} has only {one.tokens} tokens in {one.documents} documents, not one row"
            remedy = "shorten the sequence, use more text, or change shards.heldout_fraction and shards.heldout_tokens"
            remedy += ", or leave this source out" * several
            raise CorpusError(explain("shards.sequence_length", settings.sequence_length, problem, remedy))


def _fraction(settings: ShardsConfig, share: np.ndarray, length: np.ndarray) -> float:
    """Return the share of the documents to hold out: the largest that keeps to ``shards.heldout_tokens``. ``share``: hash of
    each document's text, ``length``: its tokens."""
    fraction, limit = settings.heldout_fraction, int(settings.heldout_tokens)
    if fraction == 1 or not limit:
        return fraction
    chosen = np.flatnonzero(_is_held_out(share, fraction))
    chosen = chosen[np.argsort(share[chosen], kind="stable")]
    too_many = np.flatnonzero(np.cumsum(length[chosen], dtype=np.int64) > limit)
    return float(share[chosen[too_many[0]]] / 2.0**64) if len(too_many) else fraction


def _is_held_out(share: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out. It depends on their text alone: copies in other datasets are, too, if they hold
    out the same fraction."""
    return np.ones(len(share), dtype=bool) if fraction == 1 else share / 2.0**64 < fraction


def _cut(
    settings: ShardsConfig, split: str, first: int, part: np.ndarray, row: np.ndarray, length: np.ndarray
) -> Iterator[ShardPlan]:
    """Cut the documents, end to end, into rows of sequence_length + 1 at a stride of sequence_length: a row repeats the last
    token of the previous row as its first input, so every token but the very first is predicted once. ``first``: number of the
    first shard."""
    ends = np.cumsum(length, dtype=np.int64)
    stride = settings.sequence_length
    total_rows = (int(ends[-1]) - 1) // stride if len(ends) else 0
    shard_rows = settings.rows_per_group * settings.groups_per_shard
    for number, first_row in enumerate(range(0, total_rows, shard_rows), start=first):
        rows = min(shard_rows, total_rows - first_row)
        begin, end = first_row * stride, (first_row + rows) * stride + 1
        opens, closes = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left")
        inside = slice(int(opens), int(closes) + 1)
        skip = begin - int(ends[opens] - length[opens])
        yield ShardPlan(split, number, first_row, rows, part[inside], row[inside], skip)


def _fit(
    settings: ShardsConfig, split: str, first: int, part: np.ndarray, row: np.ndarray, length: np.ndarray
) -> Iterator[ShardPlan]:
    """Fit documents together, from neighbours that fill about one shard at a time. ``first``: number of the first shard."""
    capacity = settings.sequence_length + 1
    shard_tokens = capacity * settings.rows_per_group * settings.groups_per_shard
    ends = np.cumsum(length, dtype=np.int64)
    first_row, begin, number = 0, 0, first
    while begin < len(length):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + shard_tokens, side="right")))
        pieces = shuffle_rows(best_fit(length[begin:end], capacity), settings.seed, number)
        rows = int(pieces[-1, 0]) + 1
        yield ShardPlan(split, number, first_row, rows, part[begin:end], row[begin:end], pieces=pieces)
        first_row, begin, number = first_row + rows, end, number + 1


def _index(work: Folder, parts: Sequence[int]) -> tuple[np.ndarray, ...]:
    columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
    for number in parts:
        table = read_columns(work, number, ["high", "low", "share", "length"])
        columns[0].append(np.full(table.num_rows, number, dtype=np.int64))
        columns[1].append(np.arange(table.num_rows, dtype=np.int32))
        for place, name in enumerate(("high", "low", "share", "length"), start=2):
            columns[place].append(table[name].to_numpy())
    return tuple(np.concatenate(column) for column in columns)
