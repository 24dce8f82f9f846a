"""Write the planned shards. This is the second pass of the shuffle: a task reads the documents of a bundle (a few shards) from
all segments (sorted files), and packs them into rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.config.data import ShardsConfig
from springtide.corpus import BANDS, Tokenizer
from springtide.dataset.apart import write_signatures
from springtide.dataset.columns import ColumnFile
from springtide.dataset.parts import EXAMPLE_CHARACTERS, EXAMPLES, open_work_tokenizer
from springtide.dataset.plan import Documents, Drop, Plan, ShardPlan
from springtide.dataset.plan_files import read_bundle
from springtide.dataset.segments import Segment
from springtide.shards import HELDOUT, Shard, ids_of, is_predicted, masked, memory_type, write_shard
from springtide.storage import Folder

_GAP_BYTES = 2**20
"""Largest gap between two documents that are read in one request [bytes]; the gap is read too. An object store sends about 1
MiB in the time that a second request takes."""
_FOLDER = "shards"


@dataclasses.dataclass(frozen=True)
class SealJob:
    """Input of ``seal_shards``, which writes one bundle: the shards that one task writes. Picklable."""

    number: int
    settings: ShardsConfig
    dataset: Folder
    work: Folder
    end_of_text: int
    has_begin: bool
    """Whether each document begins with a begin-of-text id, which is not part of its text."""

    @property
    def output(self) -> str:
        """Name of the file that lists the written shards of the bundle. It is written last: if it exists, the job is done."""
        return _records(self.number)


def read_records(work: Folder, number: int) -> list[tuple[Shard, int]]:
    """Return (manifest record of a shard, bytes of text in the shard) for each shard of a bundle, the shards that one task
    wrote."""
    return [(Shard.model_validate(shard), num_bytes) for shard, num_bytes in work.read_json(_records(number))]


def seal_shards(job: SealJob) -> None:
    """Read the documents of a bundle (the shards that one task writes) from the segments, pack them into rows, and write the
    shards. Do nothing if they were written before."""
    if job.work.exists(job.output):
        return
    bundle = read_bundle(job.work, job.number)
    where = Documents(*map(np.concatenate, zip(*(one.documents for one in bundle.shards), strict=True)))
    tokens, bands = _read(job, where, bundle.segments)
    whole = _whole(job, where, bundle.segments) if bundle.shards[0].split == HELDOUT else {}
    records, begin = [], 0
    for plan in bundle.shards:
        mine = slice(begin, begin + len(plan.documents.segment))
        compared = [whole.get(place, tokens[place]) for place in range(mine.start, mine.stop)]
        shard, num_bytes = _seal(job, plan, tokens[mine], bands[mine], compared)
        records.append((shard.model_dump(mode="json"), num_bytes))
        begin = mine.stop
    job.work.write_json(job.output, records)


def _read(job: SealJob, where: Documents, segments: Mapping[int, Segment]) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the documents ``where`` from the segments. Return a list of their token ids, and their band hashes (which find
    similar documents), uint64 (documents, BANDS)."""
    tokens: list[np.ndarray] = [np.empty(0)] * len(where.segment)
    bands = np.empty((len(where.segment), BANDS), dtype=np.uint64)
    for segment in np.unique(where.segment).tolist():
        file = segments[segment].file(job.work, job.settings.token_type)
        for here in _ranges(
            np.flatnonzero(where.segment == segment), where, np.dtype(job.settings.token_type).itemsize
        ):
            mine = where.take(here)
            first, last = int(mine.row[0]), int(mine.row[-1]) + 1
            found = file.read("tokens", int(mine.begin[0]), int(mine.begin[-1] + mine.length[-1]))
            bands[here] = file.read("signature", first, last)[mine.row - first]
            begins = mine.begin - mine.begin[0]
            for place, begin, end in zip(here.tolist(), begins.tolist(), (begins + mine.length).tolist(), strict=True):
                tokens[place] = found[begin:end]
    return tokens, bands


def _whole(job: SealJob, where: Documents, segments: Mapping[int, Segment]) -> dict[int, np.ndarray]:
    """Find the documents of which only the beginning is held out. Return {index of the document in ``where``: all its
    tokens}."""
    found: dict[int, np.ndarray] = {}
    for segment in np.unique(where.segment).tolist():
        file = segments[segment].file(job.work, job.settings.token_type)
        here = np.flatnonzero(where.segment == segment)
        first, last = int(where.row[here].min()), int(where.row[here].max()) + 1
        lengths = file.read("length", first, last)[where.row[here] - first]
        for place, length in zip(here.tolist(), lengths.tolist(), strict=True):
            if length != where.length[place]:
                begin = int(where.begin[place])
                found[place] = file.read("tokens", begin, begin + length)
    return found


def _ranges(here: np.ndarray, where: Documents, token_bytes: int) -> Iterator[np.ndarray]:
    """Group documents of one segment so that each group can be read in one request. ``here``: indices of the documents in
    ``where``, int64 (n,). Yields the indices of each group, sorted by position in the segment. Between two groups is a gap of
    more than ``_GAP_BYTES``."""
    here = here[np.argsort(where.row[here], kind="stable")]
    mine = where.take(here)
    gaps = (mine.begin[1:] - mine.begin[:-1] - mine.length[:-1]) * token_bytes
    yield from np.split(here, np.flatnonzero(gaps > _GAP_BYTES) + 1)


def _seal(
    job: SealJob, plan: ShardPlan, documents: list[np.ndarray], bands: np.ndarray, compared: list[np.ndarray]
) -> tuple[Shard, int]:
    """Pack and write one shard. Return its record for the manifest, and its number of bytes of text. ``compared``: all tokens
    of each document, even if only its beginning is held out; hashes to compare with other datasets are computed from them."""
    length = job.settings.sequence_length
    if plan.pieces is None:
        line = np.concatenate(documents)[plan.skip :]
        rows = np.lib.stride_tricks.sliding_window_view(line, length + 1)[: plan.rows * length : length]
    else:
        rows = _fill(documents, plan.pieces, plan.rows, length + 1, job.end_of_text)
    lengths = open_work_tokenizer(job.work, job.end_of_text).byte_lengths()
    wide = memory_type(job.settings.token_type, len(lengths))
    num_bytes = np.array([_num_bytes(row[1:].astype(wide, copy=False), lengths) for row in rows], dtype=np.int64)
    shard = write_shard(job.dataset, plan.name, job.settings, plan.first_row, num_bytes, rows)
    texts = [ids_of(document[1:]) for document in compared] if job.has_begin else compared
    if plan.skip > length * job.settings.rows_per_group * job.settings.groups_per_shard:
        # leave out the shingles (hashes of token runs) of the first document: an earlier shard has them. A long document spans
        # many shards, and shingles of the whole document in each of them would take space that grows
        # with the square of its length
        texts = [texts[0][:0], *texts[1:]]
    return write_signatures(job.dataset, shard, plan.split, bands, texts), int(num_bytes.sum())


def _fill(documents: Sequence[np.ndarray], pieces: np.ndarray, rows: int, capacity: int, padding: int) -> np.ndarray:
    """Return the rows of a shard, (rows, capacity). Each row holds pieces of documents, then ids ``padding``, which are not
    predicted. The first token of a piece is not predicted either: it is the begin-of-text id, or repeats the last token of the
    document's previous piece."""
    found = masked(np.full((rows, capacity), padding, dtype=documents[0].dtype))
    filled = np.zeros(rows, dtype=np.int64)
    for row, document, begin, end in pieces.tolist():
        at = filled[row]
        found[row, at : at + end - begin] = documents[document][begin:end]
        found[row, at : at + 1] = masked(found[row, at : at + 1])
        filled[row] += end - begin
    return found


def _num_bytes(row: np.ndarray, lengths: np.ndarray) -> int:
    """Return how many bytes of text the predicted tokens of ``row`` stand for. ``lengths``: bytes of text per token id."""
    return int(lengths[row[is_predicted(row)]].sum())


def _records(number: int) -> str:
    return f"{_FOLDER}/{number:06d}.json"


# Compute the statistics that the dataset card shows: counts, and examples of dropped documents.

_GROUPS_NAMED = 12
_TOKENS_BEFORE, _TOKENS_SHOWN = 16, EXAMPLE_CHARACTERS
"""An example of a near-duplicate begins 16 tokens before the first token that differs from the kept document. At most 200
tokens of an example are decoded."""


def statistics(
    records: list[dict[str, Any]], plan: Plan, segments: Sequence[ColumnFile], vocabulary: Tokenizer
) -> dict[str, Any]:
    """Return the statistics for the dataset card: numbers of documents, characters and tokens, dropped documents by reason with
    examples, and a few broken records.

    Args:
        records: for each unit (a few source files), the counts that ``make_part`` wrote.
        segments: the files of all segments. The texts of the examples of dropped documents are read from them.
    """
    documents, edits, groups = (_total(records, name) for name in ("documents", "edits", "tokens_by_group"))
    largest = dict(groups.most_common(_GROUPS_NAMED))
    kept = documents.pop("kept", 0)
    ends_inside = sum(record.get("ends_inside", 0) for record in records)
    return {
        "documents": kept + sum(documents.values()),
        "dropped": {**documents, **plan.dropped},
        "edits": dict(edits),
        "characters": sum(record["characters"] for record in records),
        "pairs": sum(record["pairs"] for record in records),
        **({"ends_inside": ends_inside} if ends_inside else {}),
        "tokens_before_deduplication": groups.total(),
        "tokens_by_group": [*largest.items(), ("others", groups.total() - sum(largest.values()))],
        "documents_by_tokens": [list(one) for one in plan.documents_by_tokens],
        "broken": [sample for record in records for sample in record["broken"]][:20],
        "examples": [
            *_first(example for record in records for example in record["examples"]),
            *(_example(drop, segments, vocabulary) for drop in plan.examples),
        ],
    }


def _total(records: list[dict[str, Any]], name: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for record in records:
        total.update({key: count for key, count in record[name].items() if count})
    return total


def _first(examples: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return the first three examples for each reason to drop a document."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for example in examples:
        seen[example["reason"]] += 1
        found += [example] if seen[example["reason"]] <= EXAMPLES else []
    return found


def _example(drop: Drop, segments: Sequence[ColumnFile], vocabulary: Tokenizer) -> dict[str, Any]:
    """Return an example of a dropped document for the dataset card: the beginning of its text. For a duplicate, also return the
    beginning of the kept document. Near-duplicates are shown from 16 tokens before the first token that differs."""
    name, ids = _document(segments, drop.place, vocabulary)
    found = {"reason": drop.reason, "name": name}
    if drop.kept is None:
        return {**found, "sample": _excerpt(ids, 0, vocabulary)}
    kept_name, kept_ids = _document(segments, drop.kept, vocabulary)
    common = min(len(ids), len(kept_ids))
    differ = np.flatnonzero(ids[:common] != kept_ids[:common])
    begin = max(0, (int(differ[0]) if len(differ) else common) - _TOKENS_BEFORE) if drop.similarity < 1 else 0
    return {
        **found,
        "sample": _excerpt(ids, begin, vocabulary),
        "kept_name": kept_name,
        "kept_sample": _excerpt(kept_ids, begin, vocabulary),
        "similarity": round(drop.similarity, 2),
    }


def _document(segments: Sequence[ColumnFile], place: tuple[int, int], vocabulary: Tokenizer) -> tuple[str, np.ndarray]:
    """Return the name of a document and the token ids of its text. ``place``: (number of its segment, index in the segment)."""
    segment, row = place
    length = segments[segment].read("length", 0, row + 1)
    end = int(length.sum(dtype=np.int64))
    tokens = segments[segment].read("tokens", end - int(length[-1]), end)
    tokens = tokens.astype(memory_type(tokens.dtype.name, vocabulary.size))
    return segments[segment].name_of(row), tokens[is_predicted(tokens)][:-1]


def _excerpt(ids: np.ndarray, begin: int, vocabulary: Tokenizer) -> str:
    return vocabulary.decode(ids[begin : begin + _TOKENS_SHOWN].tolist())[:EXAMPLE_CHARACTERS]
