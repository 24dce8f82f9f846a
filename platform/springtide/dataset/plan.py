"""Plan a dataset from its segments (files of documents, sorted by a hash of the text): drop duplicates, order the documents,
hold some out, and divide them into shards.

Memory holds no text, but 75 to 90 bytes per document: keys (hashes of texts), lengths, and band hashes, which find
near-duplicates. Of the 16 band hashes of a document, one at a time is in memory.
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
"""Lower edges of the histogram of document lengths [tokens]: 0, 16, 64, 256, ... 1,048,576."""


class Documents(NamedTuple):
    """Documents in their order in the dataset or in a shard, each given by its place in a segment (sorted file of
    documents)."""

    segment: np.ndarray
    """int32 (documents,): number of the segment that stores the document."""
    row: np.ndarray
    """int32 (documents,): index of the document among the documents of the segment."""
    begin: np.ndarray
    """int64 (documents,): index of the document's first token among the tokens of the segment."""
    length: np.ndarray
    """int32 (documents,): number of tokens of the document."""

    def take(self, which: np.ndarray | slice) -> Documents:
        """Return the documents that the index array, mask or slice ``which`` selects."""
        return Documents(*(column[which] for column in self))


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """One shard of the dataset: its documents in order, and which of their tokens it holds."""

    split: str
    number: int
    """Number of the shard in the split. The shards of a source have consecutive numbers."""
    first_row: int
    """Index of the shard's first row among all rows of its source in the split."""
    rows: int
    documents: Documents
    skip: int = 0
    """Number of tokens of the first document that are in earlier shards. Always 0 if documents are packed by best fit."""
    pieces: np.ndarray | None = None
    """int32 (pieces, 4): for each piece of a document, its row in the shard, the index of its document, and the begin and the
    end (exclusive) of the piece in the document [tokens]. None if documents are packed end to end (``shards.packing:
    concat``)."""

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.parquet"


Lay = Callable[[ShardsConfig, str, int, Documents], Iterator[ShardPlan]]


class Drop(NamedTuple):
    """Example of a document that the plan drops, for the dataset card."""

    reason: str
    place: tuple[int, int]
    """(number of the segment, index in the segment) of the dropped document."""
    kept: tuple[int, int] | None
    """(number of the segment, index in the segment) of the document that is kept instead. None if the document was not dropped
    as a duplicate."""
    similarity: float
    """Jaccard similarity of the dropped and the kept document: 1 for equal texts, 0 if ``kept`` is None."""


class Cut(NamedTuple):
    """A document that is cut in two: its beginning is held out, the rest is for training."""

    place: tuple[int, int]
    """(number of the segment, index in the segment) of the document."""
    tokens: int
    """Number of tokens at the document's beginning that are held out."""


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """The shards of one source in one split (train or heldout), and their numbers of documents and tokens."""

    source: str
    split: str
    documents: int
    tokens: int
    shards: tuple[ShardPlan, ...]
    """Empty if the source has too few tokens in the split to fill one row."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which documents go to which shards of a dataset, and counts for its manifest."""

    splits: tuple[SplitPlan, ...]
    """One entry for each pair of a source and a split."""
    dropped: dict[str, int]
    """Reason -> number of documents that the plan drops. Earlier stages drop documents for other reasons."""
    examples: tuple[Drop, ...]
    """The first three documents dropped for each reason."""
    documents_by_tokens: tuple[tuple[int, int], ...]
    """Histogram of the lengths of kept documents: (lower edge of a bin in tokens, number of documents in the bin)."""
    heldout_fraction: float
    """Share of the documents that is held out: ``shards.heldout_fraction``, or less to stay within
    ``shards.heldout_tokens``."""
    cut: Cut | None = None
    """A document whose beginning is held out, if there are too few documents to hold out a whole document; otherwise None."""


def make_plan(
    work: Folder,
    segments: Sequence[Segment],
    settings: ShardsConfig,
    near_duplicates: bool,
    apart: ApartFrom,
    may_cut: bool = False,
) -> Plan:
    """Compute the plan from the columns of the segments. The plan does not depend on how many processes made the segments.

    The segments of a source must be consecutive. If documents of several sources are equal or similar, the document of the
    first source is kept. If ``near_duplicates`` is True, ``near.find_sharing`` must have run for all bands. ``may_cut``:
    whether the beginning of a document may be held out if no whole document can be, for example if the corpus is one book.
    """
    lay = look_up({"concat": _cut, "best_fit": _fit}, "shards.packing", settings.packing)
    where, high, low, share = _index(work, segments, settings.token_type)
    length = where.length
    names = list(dict.fromkeys(segment.source for segment in segments))
    numbers = {name: number for number, name in enumerate(names)}
    source = np.array([numbers[segment.source] for segment in segments], dtype=np.int32)[where.segment]

    def place(index: int) -> tuple[int, int]:
        return int(where.segment[index]), int(where.row[index])

    # sort by key, so that equal texts are neighbours; keep the first of equal texts, in the order of segments and rows
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
        # search in the order of sources, because the first of several near-duplicates is kept
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
    """Divide the documents of each source and split into shards. ``lay``: function that packs documents into rows and shards;
    ``names``: names of the sources; ``source``: index in ``names`` of each document's source; ``train`` and ``heldout``:
    indices in ``where`` of the documents of the two splits, in order; ``fraction``: share that is held out."""
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
    """Return how many tokens of the longest document to hold out. The target is ``shards.heldout_fraction`` of ``total``
    tokens, but at least one row. The limits are half of the document's ``longest`` tokens, and ``shards.heldout_tokens``.
    Return 0 if the limits leave less than one row."""
    row = settings.sequence_length + 1
    tokens = min(max(round(settings.heldout_fraction * total), row), longest // 2)
    if settings.heldout_tokens:
        tokens = min(tokens, int(settings.heldout_tokens))
    return tokens if tokens >= row else 0


def _with_part(where: Documents, document: int, tokens: int) -> Documents:
    """Cut a document in two: return ``where`` with one more document at its end, the first ``tokens`` tokens of ``document``.
    ``document`` keeps the other tokens."""
    found = Documents(*(np.append(column, column[document]) for column in where))
    found.length[-1] = tokens
    found.begin[document] += tokens
    found.length[document] -= tokens
    return found


def check_plan(plan: Plan, settings: ShardsConfig, corpus: str) -> None:
    """Raise CorpusError if a source fills no row for training, or if all sources together fill no held-out row. If all
    text is held out, each source must fill a held-out row. ``corpus``: name of the corpus, for the error."""
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
    """Return the share of the documents to hold out: ``shards.heldout_fraction``, or the largest smaller share that stays
    within ``shards.heldout_tokens``. ``share``: hash of each document's text; ``length``: its number of tokens."""
    fraction, limit = settings.heldout_fraction, int(settings.heldout_tokens)
    if fraction == 1 or not limit:
        return fraction
    chosen = np.flatnonzero(_is_held_out(share, fraction))
    chosen = chosen[np.argsort(share[chosen], kind="stable")]
    too_many = np.flatnonzero(np.cumsum(length[chosen], dtype=np.int64) > limit)
    return float(share[chosen[too_many[0]]] / 2.0**64) if len(too_many) else fraction


def _is_held_out(share: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out, bool (n,). Only the hash of the text, ``share``, decides. So a text that is held out
    in one dataset is also held out in any other dataset with an equal ``fraction``."""
    return np.ones(len(share), dtype=bool) if fraction == 1 else share / 2.0**64 < fraction


def _cut(settings: ShardsConfig, split: str, first: int, documents: Documents) -> Iterator[ShardPlan]:
    """Join the documents end to end, cut them into rows of sequence_length + 1 tokens, and divide the rows into shards.

    The first token of a row repeats the last token of the previous row. The model reads this token but does not predict it
    again, so every token except the very first is predicted exactly once. ``first``: number of the first shard."""
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
    """Pack documents into rows by best fit, so that few documents are cut. Packs about one shard of consecutive documents at a
    time. ``first``: number of the first shard."""
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
    """Read the keys of all segments. Return the places of all documents, the high and the low half of their keys (hashes that
    decide the order), and the hashes that decide whether they are held out, uint64 (documents,) each."""
    found = [segment.file(work, token_type).read_keys() for segment in segments]
    length = np.concatenate([one["length"] for one in found])
    segment = np.repeat(np.arange(len(segments), dtype=np.int32), [len(one["length"]) for one in found])
    row = np.concatenate([np.arange(len(one["length"]), dtype=np.int32) for one in found])
    begin = np.concatenate([np.cumsum(one["length"], dtype=np.int64) - one["length"] for one in found])
    high, low, share = (np.concatenate([one[name] for one in found]) for name in ("high", "low", "share"))
    return Documents(segment, row, begin, length), high, low, share
