"""What a dataset's card says of its source: counts, and examples of what was dropped."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from springtide.corpus import Tokenizer
from springtide.dataset.columns import ColumnFile
from springtide.dataset.parts import EXAMPLE_CHARACTERS, EXAMPLES
from springtide.dataset.plan import Drop, Plan
from springtide.shards import is_predicted, memory_type

_GROUPS_NAMED = 12
_TOKENS_BEFORE, _TOKENS_SHOWN = 16, EXAMPLE_CHARACTERS
"""Tokens that are decoded before the first difference of two documents, and in all."""


def statistics(
    records: list[dict[str, Any]], plan: Plan, segments: Sequence[ColumnFile], vocabulary: Tokenizer
) -> dict[str, Any]:
    """Return the statistics of the source: documents, drops by reason with examples, characters, tokens, a few broken records.

    Args:
        records: the counts of each unit.
        segments: where the texts of the plan's examples are.
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
    """Return the first few examples for each reason."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for example in examples:
        seen[example["reason"]] += 1
        found += [example] if seen[example["reason"]] <= EXAMPLES else []
    return found


def _example(drop: Drop, segments: Sequence[ColumnFile], vocabulary: Tokenizer) -> dict[str, Any]:
    """Return the example of a drop: the beginning of its text; of near-duplicates both texts, from a little before the first
    token that differs."""
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
    """Return the name of a document and the ids of its text."""
    segment, row = place
    length = segments[segment].read("length", 0, row + 1)
    end = int(length.sum(dtype=np.int64))
    tokens = segments[segment].read("tokens", end - int(length[-1]), end)
    tokens = tokens.astype(memory_type(tokens.dtype.name, vocabulary.size))
    return segments[segment].name_of(row), tokens[is_predicted(tokens)][:-1]


def _excerpt(ids: np.ndarray, begin: int, vocabulary: Tokenizer) -> str:
    return vocabulary.decode(ids[begin : begin + _TOKENS_SHOWN].tolist())[:EXAMPLE_CHARACTERS]
