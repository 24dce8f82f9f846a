"""Unit of the source -> part: its documents cleaned, hashed and tokenised, sorted by their place in the dataset.

    documents  [text] [text] [text]                      of one unit, in file order
    part       key, split, length, bands, tokens         Parquet, sorted by key
               counts                                    JSON, written last: a part without it is made again

The key is a keyed hash of the text: sorting by it shuffles globally and makes equal texts neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import Broken, CorpusReader, Document, Tokenizer, Unit, bands, clean
from springtide.dataset.apart import open_exclusions
from springtide.dataset.signatures import BAND_COLUMNS
from springtide.errors import legible, redacted
from springtide.shards import TOKENIZER, masked
from springtide.store import Folder

_DOCUMENTS_A_GROUP = 64
_SAMPLES = 5
EXAMPLES, EXAMPLE_CHARACTERS = 3, 200
"""Dropped documents that are shown for each reason, and how much of each."""


@dataclasses.dataclass(frozen=True)
class PartJob:
    """The input to make one part. Picklable."""

    number: int
    source: CorpusReader
    corpus: CorpusConfig
    """Settings for reading and cleaning this source."""
    unit: Unit
    group: str
    """Name that its tokens are counted under; empty counts by the first folder of each document."""
    shards: ShardsConfig
    work: Folder
    """Folder for parts and the tokenizer until the dataset is sealed."""
    apart_from: tuple[str, ...] = ()
    """Datasets whose held-out text it must not contain."""

    def done(self) -> bool:
        """Return whether the part was already made."""
        return self.work.exists(_counts(self.number))


def _counts(number: int) -> str:
    return f"parts/{number:06d}.json"


def _rows(number: int) -> str:
    return f"parts/{number:06d}.parquet"


def make_part(job: PartJob) -> None:
    """Read, clean, tokenise and write one part, unless it was already made."""
    if job.done():
        return
    vocabulary = open_work_tokenizer(job.work, job.corpus.end_of_text)
    key = job.shards.seed.to_bytes(8, "little")
    counts: collections.Counter[str] = collections.Counter()
    samples: list[dict[str, str]] = []
    dropped = _Examples()
    rows: list[dict[str, Any]] = []
    for found in job.source.read(job.unit):
        if isinstance(found, Broken):
            counts[found.reason] += 1
            if len(samples) < _SAMPLES:
                samples.append({**found._asdict(), "name": _shown(found.name)})
            continue
        text, reason = clean(found.text, job.corpus)
        if reason:
            dropped.add(reason, found)
            continue
        document = found._replace(text=text)
        place = hashlib.blake2b(document.digest, key=key, digest_size=16).digest()
        share = int.from_bytes(document.digest[:8], "little")
        group = job.group or _first_folder(found.name)
        rows.append({"document": document, "place": place, "share": share, "group": group})
    for row, ids in zip(rows, vocabulary.encode([row["document"].text for row in rows]), strict=True):
        row["tokens"], row["bands"] = ids, bands(ids)
    if job.corpus.apart_from:
        rows = [row for row in rows if not dropped.add(_excluded(job, row), row["document"])]
    rows.sort(key=lambda row: row["place"])
    if (bos_id := begin_of_text(vocabulary, job.corpus, job.shards)) is not None:
        first = masked(np.array([bos_id], dtype=job.shards.token_type))
        for row in rows:
            row["tokens"] = np.concatenate([first, row["tokens"].astype(job.shards.token_type)])
    job.work.write(_rows(job.number), _encode(rows, job.shards.token_type))
    groups: collections.Counter[str] = collections.Counter()
    for row in rows:
        groups[row["group"]] += len(row["tokens"])
    record = {
        "documents": {**(counts + dropped.counts), "kept": len(rows)},
        "characters": sum(len(row["document"].text) for row in rows),
        "tokens_by_group": groups,
        "broken": samples,
        "examples": dropped.examples,
    }
    job.work.write_json(_counts(job.number), record)


def _excluded(job: PartJob, row: dict[str, Any]) -> str:
    """Return why ``corpus.apart_from`` excludes a document, empty if it does not."""
    return open_exclusions(job.work, job.apart_from).reason(row["document"].text, row["tokens"], row["bands"])


class _Examples:
    """Documents that are dropped, counted by reason, and the first few for each reason."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: list[dict[str, str]] = []

    def add(self, reason: str, document: Document) -> bool:
        """Count a document that is dropped for ``reason``; return False if there is none."""
        if not reason:
            return False
        self.counts[reason] += 1
        if self.counts[reason] <= EXAMPLES:
            sample = document.text[:EXAMPLE_CHARACTERS]
            self.examples.append({"reason": reason, "name": _shown(document.name), "sample": sample})
        return True


def _first_folder(name: str) -> str:
    """Return the first folder of a document's name, or its file."""
    return _shown(name).split("/")[0].split("@")[0]


def _shown(name: str) -> str:
    """Return a file's name for the manifest and the card: names are bytes, and that of a URL may end in a signature."""
    return legible(redacted(name))


@functools.lru_cache(maxsize=1)
def open_work_tokenizer(work: Folder, end_of_text: str | int) -> Tokenizer:
    """Return the tokenizer of a prepare; cached, because one process makes many parts."""
    return Tokenizer.from_json(work.read(TOKENIZER).decode(), end_of_text=end_of_text)


def begin_of_text(vocabulary: Tokenizer, corpus: CorpusConfig, shards: ShardsConfig) -> int | None:
    """Return the id that stands before each document and is not predicted; None if none does."""
    if corpus.begin_of_text:
        return vocabulary.id_of(corpus.begin_of_text, "corpus.begin_of_text")
    return vocabulary.end_of_text if shards.mask_across_documents else None


def _encode(rows: list[dict[str, Any]], token_type: str) -> bytes:
    places = np.frombuffer(b"".join(row["place"] for row in rows), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    signatures = np.array([row["bands"] for row in rows], dtype=np.uint64).reshape(-1, len(BAND_COLUMNS))
    lengths = np.array([len(row["tokens"]) for row in rows], dtype=np.int32)
    flat = np.concatenate([row["tokens"] for row in rows] or [np.empty(0)]).astype(token_type)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns: dict[str, Any] = {
        "high": places[:, 0],
        "low": places[:, 1],
        "share": np.array([row["share"] for row in rows], dtype=np.uint64),
        "length": lengths,
        **{name: signatures[:, number] for number, name in enumerate(BAND_COLUMNS)},
        "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
    }
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=_DOCUMENTS_A_GROUP, compression="none", use_dictionary=False)
    return out.getvalue()


def read_counts(work: Folder, number: int) -> dict[str, Any]:
    """Return the counts of a part: documents kept or dropped by reason, characters, tokens by group, broken samples."""
    return dict(work.read_json(_counts(number)))


def read_columns(work: Folder, number: int, names: list[str]) -> pa.Table:
    """Return some columns of a part."""
    with work.open(_rows(number)) as file:
        return pq.read_table(file, columns=names)


def read_documents(work: Folder, number: int, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the token ids of documents of a part and their band hashes, uint64 (documents, BANDS). They are given by their
    rows in rising order; reads only their row groups."""
    groups = rows // _DOCUMENTS_A_GROUP
    found: list[np.ndarray] = []
    signatures: list[np.ndarray] = []
    with work.open(_rows(number)) as file:
        parquet = pq.ParquetFile(file)
        for group in np.unique(groups).tolist():
            table = parquet.read_row_group(group, ["tokens", *BAND_COLUMNS])
            lists = table["tokens"].combine_chunks()
            values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
            inside = rows[groups == group] - group * _DOCUMENTS_A_GROUP
            found += [values[offsets[row] : offsets[row + 1]] for row in inside.tolist()]
            signatures.append(np.stack([table[name].to_numpy()[inside] for name in BAND_COLUMNS], axis=1))
    return found, np.concatenate(signatures)
