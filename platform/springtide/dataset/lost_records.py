"""Report unusable records of a source: a warning if more than 1% are unusable, an error if more than 50% are or if no document
is left."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import UNSPLIT
from springtide.corpus.chats import EMPTY, EQUAL, ONE_SIDED, REFUSED, UNANSWERED
from springtide.dataset.chats import TOO_LONG
from springtide.errors import CorpusError, explain, printable, redacted

NOT_UTF_8 = "bytes that are not UTF-8 replaced: documents"
"""Key in ``edits`` (counts of changes to documents) for the number of documents with U+FFFD in place of bad bytes."""
_TOLD_FROM, _REFUSED_FROM = 0.01, 0.5
"""Limits for the share of a source's records that are unusable: a larger share than the first causes a warning, a larger share
than the second an error."""
_SHOWN = 120
DROPPED_AS_NOT_UTF_8 = "not UTF-8"
_MAY_BE_MANY = (EMPTY, UNANSWERED, EQUAL, ONE_SIDED, TOO_LONG, DROPPED_AS_NOT_UTF_8)
"""Reasons that are no sign of a wrong setting or a damaged file. Records dropped for these reasons do not count towards the
limit ``_REFUSED_FROM``, so even many of them cause no error."""


class _Count(NamedTuple):
    """Numbers of records of one source: kept, dropped by a rule, and unusable. Also an example for messages."""

    setting: str
    source: str
    field: str
    total: int
    kept: int
    dropped: collections.Counter[str]
    """Reason -> number of records that are not kept."""
    lost: collections.Counter[str]
    """Reason -> number of records that are unusable, such as broken JSON. A part of ``dropped``, which also counts the records
    that a cleaning rule drops."""
    broken: Mapping[str, Any] | None
    """The first record that cannot be read as a document, with the keys name, reason, sample and fields. None if every
    record can be read."""
    replaced: int
    """Number of documents with U+FFFD in place of bytes that are not UTF-8."""
    replaced_first: str

    def reasons(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())


def check_lost(
    corpus: CorpusConfig, shards: ShardsConfig, groups: Sequence[str], counts: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return warnings about unusable records and about bytes that are not UTF-8, one line each. A unit is a few source files.

    Args:
        groups: for each unit, the name of its source; empty if there is only one source.
        counts: for each unit, the counts that ``make_part`` wrote.

    Raises:
        CorpusError: a source has no document left, or more than half of its records cannot be used.
    """
    remarks = []
    for name, each in corpus.each().items():
        mine = [unit for group, unit in zip(groups, counts, strict=True) if group in ("", name)]
        count = _counted(f"corpus.sources.{name}" if corpus.sources else "corpus.source", each, mine)
        unusable = count.lost.total() - sum(count.lost[reason] for reason in _MAY_BE_MANY)
        if not count.kept or unusable > _REFUSED_FROM * count.total:
            raise _refused(count, shards)
        if (lost := count.lost.total()) > _TOLD_FROM * count.total:
            reasons = ", ".join(f"{many:,} {reason}" for reason, many in count.lost.most_common())
            remarks.append(
                f"{_named(count)}: {lost:,} of {count.total:,} records are not used: {reasons}{_first(count)}"
            )
        if count.replaced:
            said = (
                f"{count.replaced:,} documents have U+FFFD where bytes are not UTF-8, the first {count.replaced_first}"
            )
            remarks.append(f"{_named(count)}: {said}; convert the files, or set corpus.broken_text to drop")
    return remarks


def _counted(setting: str, each: CorpusConfig, units: Sequence[Mapping[str, Any]]) -> _Count:
    dropped, lost = collections.Counter[str](), collections.Counter[str]()
    kept = replaced = 0
    for unit in units:
        kept += unit["documents"]["kept"]
        dropped.update({reason: many for reason, many in unit["documents"].items() if reason != "kept" and many})
        lost.update(unit.get("lost", {}))
        replaced += unit["edits"].get(NOT_UTF_8, 0)
    broken = next((one for unit in units for one in unit["broken"]), None)
    if broken is not None:
        broken = {**broken, "fields": next((unit["fields"] for unit in units if unit.get("fields")), [])}
    replaced_first = next((one["name"] for unit in units for one in unit["examples"] if one["reason"] == NOT_UTF_8), "")
    total = kept + dropped.total()
    return _Count(
        *(setting, redacted(each.source), each.field, total, kept, dropped, lost, broken, replaced, replaced_first)
    )


def _refused(count: _Count, shards: ShardsConfig) -> CorpusError:
    """Return the error for a source with no document left, or with too many unusable records."""
    if not count.total:
        return CorpusError(
            explain(count.setting, count.source, "holds no text", "point it at files that are not empty")
        )
    reason, many = count.dropped.most_common(1)[0]
    of = f"of the {count.total:,} records of {count.source}"
    if reason == TOO_LONG:
        limit = f"{many:,} {of} are chats longer than a row"
        return CorpusError(
            explain("shards.sequence_length", shards.sequence_length, limit, "raise shards.sequence_length")
        )
    fields = count.broken["fields"] if count.broken else []
    if reason == no_text(count.field) and fields:
        limit = f"is no text in {many:,} {of}: the first has {printable(', '.join(fields))}"
        return CorpusError(explain("corpus.field", count.field, limit, "name the field that holds the text"))
    limit = f"{count.dropped.total():,} of {count.total:,} records cannot be used: {count.reasons()}{_first(count)}"
    remedy = "mend them, or leave their files out"
    if not count.lost:
        remedy = "point it at other files, or loosen corpus.min_characters and the other filters"
    return CorpusError(explain(count.setting, count.source, limit, remedy))


def no_text(field: str) -> str:
    """Return the reason under which reports count a record without text in ``field``."""
    return f"no text in {field!r}"


def lost_of(broken: Mapping[str, int], dropped: Mapping[str, int]) -> dict[str, int]:
    """Return reason -> number of unusable records of a unit (a few source files). All ``broken`` records are unusable.
    Of the ``dropped`` documents, some are unusable, such as chats longer than a row. Documents that a filter drops are not
    counted. ``broken`` and ``dropped``: reason -> number."""
    reasons = (TOO_LONG, DROPPED_AS_NOT_UTF_8, REFUSED, f"{UNSPLIT} it")
    return {**broken, **{reason: dropped[reason] for reason in reasons if dropped.get(reason)}}


def _named(count: _Count) -> str:
    return f"{count.setting} = {count.source!r}"


def _first(count: _Count) -> str:
    return (
        f"; the first: {count.broken['name']}: {printable(count.broken['sample'][:_SHOWN])!r}" if count.broken else ""
    )
