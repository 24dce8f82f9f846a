"""Store signatures (hashes) of a finished dataset's documents, one Parquet file per shard. A later dataset reads them to avoid
documents that this dataset holds (``corpus.apart_from``).

signatures/train-00000.parquet      16 band hashes per document, uint64, which find similar documents
signatures/heldout-00000.parquet    16 band hashes per document, and the hashes of its runs of 5 tokens (shingles), uint32,
                                    which give the similarity of two documents
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.corpus import BANDS, shingles
from springtide.errors import CorpusError
from springtide.shards import HELDOUT, Shard
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
    held-out shard, shingles (hashes of runs of 5 tokens) are computed from them. They are empty if the file of an earlier shard
    has the document's shingles."""
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
