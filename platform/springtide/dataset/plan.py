"""Plan a dataset from all segments (files of documents sorted by key): drop duplicates, order the documents, hold some out, and
cut shards.

Memory holds about 75 to 90 bytes per document and no text: keys (hashes of texts), lengths, and one band of the signatures
(hashes that find near-duplicates) at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from springtide.config.data import ShardsConfig
from springtide.corpus import BANDS
from springtide.dataset.apart import TRAINED_ON, ApartFrom, trained_on
from springtide.dataset.near import near_duplicates_among, read_bands
from springtide.dataset.parts import EXAMPLES
from springtide.dataset.segments import Segment
from springtide.errors import CorpusError, explain, look_up
from springtide.shards import HELDOUT, TRAIN, best_fit, shuffle_rows
from springtide.storage import Folder

_EDGES = (0, *(2**power for power in range(4, 21, 2)))
"""Lower edges of the histogram of document lengths, in tokens."""


class Documents(NamedTuple):
    """Where documents are stored in the segments, in their order in the dataset or a shard."""

    segment: np.ndarray
    """int32 (documents,): number of the segment."""
    row: np.ndarray
    """int32 (documents,): row in the segment."""
    begin: np.ndarray
    """int64 (documents,): index of the document's first token in the segment."""
    length: np.ndarray
    """int32 (documents,): number of tokens."""

    def take(self, which: np.ndarray | slice) -> Documents:
        """Return the documents that the index array, mask or slice ``which`` selects."""
        return Documents(*(column[which] for column in self))


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """One shard: its documents in order, and the tokens that it takes from them."""

    split: str
    number: int
    """Number of the shard in the split. The shards of a source have consecutive numbers."""
    first_row: int
    """Number of the shard's first row among the rows of its source in the split."""
    rows: int
    documents: Documents
    skip: int = 0
    """Tokens of the first document that are in earlier shards; 0 unless documents are packed end to end."""
    pieces: np.ndarray | None = None
    """int32 (pieces, 4): a row of the shard, a document, and the begin and end of the piece in the document. None unless
    documents are packed by best fit."""

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.parquet"


Lay = Callable[[ShardsConfig, str, int, Documents], Iterator[ShardPlan]]


class Drop(NamedTuple):
    """A document that the plan drops."""

    reason: str
    place: tuple[int, int]
    """(segment, row in the segment) of the dropped document."""
    kept: tuple[int, int] | None
    """(segment, row) of the document that is kept instead of a duplicate; None if this is no duplicate."""
    similarity: float
    """Jaccard similarity of the dropped and the kept document: 1 for equal texts, 0 if no document is kept instead."""


class Cut(NamedTuple):
    """A document whose beginning is held out."""

    place: tuple[int, int]
    """(segment, row in the segment)."""
    tokens: int
    """Number of tokens that are held out."""


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """The documents and shards of one source in one split."""

    source: str
    split: str
    documents: int
    tokens: int
    shards: tuple[ShardPlan, ...]
    """Empty if the tokens do not fill a row."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shards of a dataset, and counts of documents and tokens."""

    splits: tuple[SplitPlan, ...]
    """One per source and split."""
    dropped: dict[str, int]
    """Reason -> number of documents dropped by the plan."""
    examples: tuple[Drop, ...]
    """The first few documents dropped for each reason."""
    documents_by_tokens: tuple[tuple[int, int], ...]
    """Histogram of kept documents: (lower edge in tokens, number of documents)."""
    heldout_fraction: float
    """Share of the documents that is held out; smaller than the setting if that would exceed ``shards.heldout_tokens``."""
    cut: Cut | None = None
    """The document whose beginning is held out, because there are too few documents to hold out a whole one."""


def make_plan(
    work: Folder,
    segments: Sequence[Segment],
    settings: ShardsConfig,
    near_duplicates: bool,
    apart: ApartFrom,
    may_cut: bool = False,
) -> Plan:
    """Compute the plan from the columns of the segments. It does not depend on how many processes made the segments.

    The segments of a source are consecutive. A document that occurs in several sources, exactly or nearly, stays in the first
    source. With ``near_duplicates``, ``near.find_sharing`` must have written which documents share hashes. ``may_cut``: whether
    the beginning of a document may be held out if no whole document can be, such as when one book is the whole corpus.
    """
    lay = look_up({"concat": _cut, "best_fit": _fit}, "shards.packing", settings.packing)
    where, high, low, share = _index(work, segments, settings.token_type)
    length = where.length
    names = list(dict.fromkeys(segment.source for segment in segments))
    numbers = {name: number for number, name in enumerate(names)}
    source = np.array([numbers[segment.source] for segment in segments], dtype=np.int32)[where.segment]

    def place(index: int) -> tuple[int, int]:
        return int(where.segment[index]), int(where.row[index])

    # sorted by key, equal texts are neighbours; the first of them, in the order of segments and rows, is kept
    order = np.lexsort((where.row, where.segment, low, high))
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    del high, low
    dropped = {"duplicate": int(again.sum())}
    first = order[np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))]
    examples = [
        Drop("duplicate", place(order[at]), place(first[at]), 1.0) for at in np.flatnonzero(again)[:EXAMPLES].tolist()
    ]
    order = order[~again]
    if near_duplicates:
        # in the order of sources, because the first of several near-duplicates is kept
        by_source = np.argsort(source[order], kind="stable")
        first = order[by_source]
        found = near_duplicates_among(work, segments, settings.token_type, first)
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
        mine = order[held_out]
        columns = (read_bands(work, segments, settings.token_type, band)[mine] for band in range(BANDS))
        met[held_out] = trained_on(np.stack(list(columns)), apart)
        dropped[TRAINED_ON] = int(met.sum())
        examples += [Drop(TRAINED_ON, place(index), None, 0.0) for index in order[met][:EXAMPLES].tolist()]
        order, held_out = order[~met], held_out[~met]
    splits = _splits(lay, settings, names, where, source, order[~held_out], order[held_out], fraction)
    cut = None
    if may_cut and fraction < 1 and len(order) and (_is_empty(splits, HELDOUT) or held_out.all()):
        train = order if held_out.all() else order[~held_out]
        longest = int(train[np.argmax(length[train])])
        if tokens := _part_to_hold_out(settings, int(length[longest]), int(length[order].sum())):
            cut = Cut(place(longest), tokens)
            heldout = np.append(order[:0] if held_out.all() else order[held_out], len(length))
            parts = _with_part(where, longest, tokens)
            splits = _splits(lay, settings, names, parts, np.append(source, source[longest]), train, heldout, fraction)
    counted = np.histogram(length[order], [*_EDGES, np.inf])[0].tolist()
    by_tokens = tuple(zip(_EDGES, counted, strict=True))
    return Plan(splits, dropped, tuple(examples), by_tokens, fraction, cut)


def _splits(
    lay: Lay,
    settings: ShardsConfig,
    names: Sequence[str],
    where: Documents,
    source: np.ndarray,
    train: np.ndarray,
    heldout: np.ndarray,
    fraction: float,
) -> tuple[SplitPlan, ...]:
    """Return the splits of each source. ``lay`` lays documents out in rows; ``source``: number of each document's source;
    ``train`` and ``heldout``: indices into ``where`` of the documents of each split, in order."""
    splits: list[SplitPlan] = []
    for split, mine in {TRAIN: train, HELDOUT: heldout}.items():
        mine = mine[np.argsort(source[mine], kind="stable")]
        bounds = np.searchsorted(source[mine], range(len(names) + 1))
        number = 0
        for name, (begin, end) in zip(names, itertools.pairwise(bounds.tolist()), strict=True):
            if fraction == 1 and split == TRAIN:
                break
            chosen = where.take(mine[begin:end])
            shards = tuple(lay(settings, split, number, chosen))
            splits.append(SplitPlan(name, split, len(chosen.segment), int(chosen.length.sum()), shards))
            number += len(shards)
    return tuple(splits)


def _is_empty(splits: Sequence[SplitPlan], split: str) -> bool:
    return not any(one.shards for one in splits if one.split == split)


def _part_to_hold_out(settings: ShardsConfig, longest: int, total: int) -> int:
    """Return how many tokens of a document of ``longest`` tokens to hold out. This is the configured share of ``total``, at
    least a row, at most half of the document and ``shards.heldout_tokens``; 0 if these limits leave less than a row."""
    row = settings.sequence_length + 1
    tokens = min(max(round(settings.heldout_fraction * total), row), longest // 2)
    if settings.heldout_tokens:
        tokens = min(tokens, int(settings.heldout_tokens))
    return tokens if tokens >= row else 0


def _with_part(where: Documents, document: int, tokens: int) -> Documents:
    """Return ``where`` with one more document: the first ``tokens`` of ``document``, which are removed from ``document``."""
    found = Documents(*(np.append(column, column[document]) for column in where))
    found.length[-1] = tokens
    found.begin[document] += tokens
    found.length[document] -= tokens
    return found


def check_plan(plan: Plan, settings: ShardsConfig, corpus: str) -> None:
    """Raise CorpusError if a source has no row to train on, or there is no row to hold out. ``corpus``: name of the corpus."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in plan.dropped.items() if count)
    several = len({one.source for one in plan.splits}) > 1
    for one in plan.splits:
        others = any(other.shards for other in plan.splits if other.split == one.split)
        may_be_empty = one.split == HELDOUT and plan.heldout_fraction < 1 and others
        if not one.shards and not may_be_empty:
            where = f"corpus.sources.{one.source}" if several else repr(corpus)
            problem = f"the {one.split} split of {where} has only {one.tokens} tokens in {one.documents} documents, not one row"
            problem += f" (dropped from all: {dropped})" if dropped else ""
            remedy = "shorten the sequence, use more text, or change shards.heldout_fraction and shards.heldout_tokens"
            remedy += ", or leave this source out" * several
            raise CorpusError(explain("shards.sequence_length", settings.sequence_length, problem, remedy))


def _fraction(settings: ShardsConfig, share: np.ndarray, length: np.ndarray) -> float:
    """Return the share of the documents to hold out: the configured one, or the largest within ``shards.heldout_tokens``.
    ``share``: hash of each document's text, ``length``: its tokens."""
    fraction, limit = settings.heldout_fraction, int(settings.heldout_tokens)
    if fraction == 1 or not limit:
        return fraction
    chosen = np.flatnonzero(_is_held_out(share, fraction))
    chosen = chosen[np.argsort(share[chosen], kind="stable")]
    too_many = np.flatnonzero(np.cumsum(length[chosen], dtype=np.int64) > limit)
    return float(share[chosen[too_many[0]]] / 2.0**64) if len(too_many) else fraction


def _is_held_out(share: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out, bool (n,). The hash of the text decides alone, so a copy of a held-out document is
    also held out in other datasets that hold out the same fraction."""
    return np.ones(len(share), dtype=bool) if fraction == 1 else share / 2.0**64 < fraction


def _cut(settings: ShardsConfig, split: str, first: int, documents: Documents) -> Iterator[ShardPlan]:
    """Cut the documents, end to end, into rows of sequence_length + 1 at a stride of sequence_length: a row repeats the last
    token of the previous row as its first input, so every token but the very first is predicted once. ``first``: number of the
    first shard."""
    length = documents.length
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
        yield ShardPlan(split, number, first_row, rows, documents.take(inside), skip)


def _fit(settings: ShardsConfig, split: str, first: int, documents: Documents) -> Iterator[ShardPlan]:
    """Pack documents into rows by best fit, for about one shard of consecutive documents at a time. ``first``: number of the
    first shard."""
    length, capacity = documents.length, settings.sequence_length + 1
    shard_tokens = capacity * settings.rows_per_group * settings.groups_per_shard
    ends = np.cumsum(length, dtype=np.int64)
    first_row, begin, number = 0, 0, first
    while begin < len(length):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + shard_tokens, side="right")))
        pieces = shuffle_rows(best_fit(length[begin:end], capacity), settings.seed, number)
        rows = int(pieces[-1, 0]) + 1
        yield ShardPlan(split, number, first_row, rows, documents.take(slice(begin, end)), pieces=pieces)
        first_row, begin, number = first_row + rows, end, number + 1


def _index(
    work: Folder, segments: Sequence[Segment], token_type: str
) -> tuple[Documents, np.ndarray, np.ndarray, np.ndarray]:
    """Return, for the documents of all segments, where they are stored, the two halves of their keys, and the hashes that
    decide which are held out, (documents,) each."""
    found = [segment.file(work, token_type).read_keys() for segment in segments]
    length = np.concatenate([one["length"] for one in found])
    segment = np.repeat(np.arange(len(segments), dtype=np.int32), [len(one["length"]) for one in found])
    row = np.concatenate([np.arange(len(one["length"]), dtype=np.int32) for one in found])
    begin = np.concatenate([np.cumsum(one["length"], dtype=np.int64) - one["length"] for one in found])
    high, low, share = (np.concatenate([one[name] for one in found]) for name in ("high", "low", "share"))
    return Documents(segment, row, begin, length), high, low, share
