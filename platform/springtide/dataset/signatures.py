"""Signatures (hashes) of a finished dataset's documents, one Parquet file per shard, to keep other datasets free of these.

signatures/train-00000.parquet      band hashes, uint64: 128 bytes a document
signatures/heldout-00000.parquet    band hashes, and the hashes of shingles, uint32: to compare documents one by one
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
"""Name of the folder of signatures in a dataset's folder."""
BAND_COLUMNS = [f"band{number:02d}" for number in range(BANDS)]
_SHINGLES = "shingles"


def write_signatures(
    dataset: Folder, shard: Shard, split: str, bands: np.ndarray, documents: list[np.ndarray]
) -> Shard:
    """Write the signatures of a shard's documents; return the shard's record with the digest of the file. ``bands``: uint64
    (documents, BANDS); ``documents``: token ids, empty for a document whose shingles are in an earlier shard's file."""
    columns: dict[str, Any] = {name: bands[:, number] for number, name in enumerate(BAND_COLUMNS)}
    if split == HELDOUT:
        found = [shingles(ids) if len(ids) else np.empty(0, np.uint32) for ids in documents]
        columns[_SHINGLES] = pa.array(found, pa.list_(pa.uint32()))
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="none", use_dictionary=False)
    dataset.write(_name(shard), out.getvalue())
    return shard.model_copy(update={"signatures": digest.of_bytes(out.getvalue())})


def read_bands(dataset: Folder, shard: Shard) -> np.ndarray:
    """Return the band hashes of a shard's documents, uint64 (BANDS, documents). CorpusError if the file is lost or changed."""
    table = _read(dataset, shard, BAND_COLUMNS)
    return np.stack([table[name].to_numpy() for name in BAND_COLUMNS])


def read_shingles(dataset: Folder, shard: Shard) -> pa.ListArray:
    """Return the shingles (hashes of token runs) of a held-out shard's documents, one sorted list each. CorpusError if the file
    is lost or changed."""
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
