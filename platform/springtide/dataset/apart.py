"""Decontamination: keep a new dataset free of text that other datasets hold out or train on, and of benchmark texts.

    parts   drop each document that resembles held-out text of another dataset, or quotes a benchmark    Exclusions
    plan    drop each held-out document that resembles training text of another dataset                  trained_on

Every finished dataset stores signatures (hashes) of its documents, one Parquet file per shard. Later datasets compare their
documents with these signatures:

    signatures/train-00000.parquet      band hashes, uint64: 128 bytes a document
    signatures/heldout-00000.parquet    band hashes, and the hashes of shingles, uint32: to compare documents one by one
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import CorpusConfig
from springtide.corpus import BANDS, SIMILAR, CorpusReader, Quotes, jaccard, open_source, quotes, quotes_of, shingles
from springtide.errors import ConfigError, CorpusError, explain, redacted
from springtide.shards import HELDOUT, MANIFEST, TOKENIZER, TRAIN, Manifest, Shard, load_manifest
from springtide.storage import Folder, digest

SIGNATURES = "signatures"
"""Name of the subfolder of a dataset that holds the signatures."""
BAND_COLUMNS = [f"band{number:02d}" for number in range(BANDS)]
_SHINGLES = "shingles"


def write_signatures(
    dataset: Folder, shard: Shard, split: str, bands: np.ndarray, documents: list[np.ndarray]
) -> Shard:
    """Write the signatures (hashes) of a shard's documents. Return the shard's manifest record, to which the hash of the
    written file is added.

    ``bands``: band hashes of the documents, uint64 (documents, BANDS). ``documents``: token ids of each document. For a
    held-out shard, shingles (hashes of runs of 5 tokens) are computed from them. Ids are left out (an empty array)
    if the file of an earlier shard already has the document's shingles."""
    columns: dict[str, Any] = {name: bands[:, number] for number, name in enumerate(BAND_COLUMNS)}
    if split == HELDOUT:
        found = [shingles(ids) if len(ids) else np.empty(0, np.uint32) for ids in documents]
        columns[_SHINGLES] = pa.array(found, pa.list_(pa.uint32()))
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="none", use_dictionary=False)
    dataset.write(_name(shard), out.getvalue())
    return shard.model_copy(update={"signatures": digest.of_bytes(out.getvalue())})


def read_bands(dataset: Folder, shard: Shard) -> np.ndarray:
    """Read the band hashes of a shard's documents, which find similar documents, uint64 (BANDS, documents). Raises CorpusError
    if the file is missing or its content has changed."""
    table = _read(dataset, shard, BAND_COLUMNS)
    return np.stack([table[name].to_numpy() for name in BAND_COLUMNS])


def read_shingles(dataset: Folder, shard: Shard) -> pa.ListArray:
    """Read the shingles (hashes of runs of 5 tokens) of the documents of a held-out shard, one sorted list per document. Raises
    CorpusError if the file is missing or its content has changed."""
    return _read(dataset, shard, [_SHINGLES])[_SHINGLES].combine_chunks()


def _name(shard: Shard) -> str:
    return f"{SIGNATURES}/{shard.name}"


def _read(dataset: Folder, shard: Shard, columns: list[str]) -> pa.Table:
    name = _name(shard)
    remedy = "restore the file, or prepare that dataset again"
    try:
        data = dataset.read(name)
    except FileNotFoundError:
        raise CorpusError(f"{dataset.where(name)}: is missing; {remedy}") from None
    if (found := digest.of_bytes(data)) != shard.signatures:
        what = f"its bytes changed after sealing; digest expected {shard.signatures}, found {found}"
        raise CorpusError(f"{dataset.where(name)}: {what}; {remedy}")
    return pq.read_table(io.BytesIO(data), columns=columns)


HELD_OUT, TRAINED_ON = "held out by corpus.apart_from", "trained on by corpus.apart_from"
QUOTES = "quotes corpus.apart_from"
_QUOTES_FILE = "quotes.npz"
_SHARDS_KEPT = 8

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ApartFrom:
    """The opened entries of ``corpus.apart_from``: datasets and benchmark texts that the new dataset must not overlap."""

    datasets: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    texts: tuple[CorpusReader, ...]

    def fingerprint(self) -> list[str]:
        """Return one hash for each dataset and each benchmark text. The hash changes when their files change."""
        return [*(manifest.digest for manifest in self.manifests), *(text.fingerprint() for text in self.texts)]

    def check(self, tokenizer_digest: str) -> None:
        """Raise ConfigError if a dataset in ``datasets`` has another tokenizer than the new dataset: documents are compared as
        token ids. ``tokenizer_digest``: hash of the new dataset's tokenizer."""
        for url, manifest in zip(self.datasets, self.manifests, strict=True):
            if manifest.tokenizer_digest != tokenizer_digest:
                limit = "has another tokenizer, and documents are compared as token ids"
                remedy = f"prepare this corpus with corpus.tokenizer = {Folder(url).where(TOKENIZER)}"
                raise ConfigError(explain("corpus.apart_from", url, limit, remedy))

    def prepare(self, work: Folder) -> None:
        """Hash the runs of words in the benchmark texts, and store the hashes in the folder ``work`` for
        ``open_exclusions``."""
        if not self.texts or work.exists(_QUOTES_FILE):
            return
        found, count, short = quotes_of(document.text for text in self.texts for document in text.documents())
        if short:
            _log.warning(
                "corpus.apart_from: %d of %d benchmark texts have fewer than 8 words and are not searched for, because they "
                "would be found by chance",
                short,
                count,
            )
        out = io.BytesIO()
        arrays: Any = {str(width): hashes for width, hashes in found.items()}
        np.savez(out, **arrays)
        work.write(_QUOTES_FILE, out.getvalue())


def open_apart(corpus: CorpusConfig) -> ApartFrom:
    """Open the entries of ``corpus.apart_from``. A folder with a manifest is a dataset; any other entry holds benchmark texts.
    Raises CorpusError if an entry does not exist."""
    datasets, manifests, texts = [], [], []
    for entry in corpus.apart_from:
        source = corpus.path(entry.source)
        folder = Folder(source)
        if folder.exists(MANIFEST):
            datasets.append(source)
            manifests.append(load_manifest(folder))
        else:
            field, is_chat = entry.field or corpus.field, bool(entry.chat_template)
            texts.append(open_source(source, entry.max_files or 0, field, is_chat=is_chat))
    return ApartFrom(tuple(datasets), tuple(manifests), tuple(texts))


class Exclusions:
    """Compares new documents with the held-out documents of other datasets and with benchmark texts. Memory holds 16 hashes per
    held-out document."""

    def __init__(self, datasets: Sequence[str], looked_for: Quotes) -> None:
        self._looked_for = looked_for
        opened = [(Folder(url), load_manifest(Folder(url))) for url in datasets]
        self._shards = [(folder, shard) for folder, manifest in opened for shard in manifest.splits[HELDOUT].shards]
        tables = [np.empty((BANDS, 0), np.uint64), *(read_bands(folder, shard) for folder, shard in self._shards)]
        bands = np.concatenate(tables, axis=1)
        self._ends = np.cumsum([table.shape[1] for table in tables[1:]], dtype=np.int64)
        self._order = np.argsort(bands, axis=1, kind="stable")
        self._bands = np.take_along_axis(bands, self._order, axis=1)
        self._lists = functools.lru_cache(maxsize=_SHARDS_KEPT)(lambda number: read_shingles(*self._shards[number]))

    def reason(self, text: str, ids: np.ndarray, bands: np.ndarray) -> str:
        """Return the reason to drop a document, or "" to keep it. ``ids``: its tokens; ``bands``: its 16 hashes that find
        similar documents."""
        if quotes(text, self._looked_for):
            return QUOTES
        candidates: set[int] = set()
        for band, value in enumerate(bands):
            begin = int(np.searchsorted(self._bands[band], value, side="left"))
            end = int(np.searchsorted(self._bands[band], value, side="right"))
            candidates.update(self._order[band, begin:end].tolist())
        mine = shingles(ids) if candidates else np.empty(0, np.uint32)
        is_close = any(jaccard(mine, self._shingles(document)) >= SIMILAR for document in sorted(candidates))
        return HELD_OUT if is_close else ""

    def _shingles(self, document: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, document, side="right"))
        row = document - int(self._ends[number - 1] if number else 0)
        return self._lists(number)[row].values.to_numpy()


@functools.lru_cache(maxsize=1)
def open_exclusions(work: Folder, datasets: tuple[str, ...]) -> Exclusions:
    """Open the held-out documents and benchmark texts to compare new documents with. Cached, because one process compares many
    documents. ``work``: folder in which ``ApartFrom.prepare`` stored hashes; ``datasets``: URLs."""
    looked_for: Quotes = {}
    if work.exists(_QUOTES_FILE):
        with np.load(io.BytesIO(work.read(_QUOTES_FILE))) as found:
            looked_for = {int(width): found[width] for width in found.files}
    return Exclusions(datasets, looked_for)


def trained_on(bands: np.ndarray, apart: ApartFrom) -> np.ndarray:
    """Return which of n documents share a band hash (one of 16 hashes that find similar documents) with training text of a
    dataset in ``apart``, bool (n,). ``bands``: uint64 (BANDS, n). Only hashes are compared, so a few documents match by
    chance. The caller drops every match: a held-out split can spare a few documents."""
    met = np.zeros(bands.shape[1], dtype=bool)
    for url, manifest in zip(apart.datasets, apart.manifests, strict=True):
        for shard in manifest.splits[TRAIN].shards if TRAIN in manifest.splits else ():
            for mine, theirs in zip(bands, read_bands(Folder(url), shard), strict=True):
                met |= np.isin(mine, theirs)
    return met


def names(apart: ApartFrom) -> list[str]:
    """Return the URLs of the entries of ``corpus.apart_from`` for the dataset card, without the passwords in URLs."""
    return [redacted(one) for one in (*apart.datasets, *(text.folder.url for text in apart.texts))]
