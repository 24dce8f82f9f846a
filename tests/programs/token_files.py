"""Writes token ids in the layouts that other programs publish, without those programs."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Documents = Sequence[np.ndarray]


def megatron(folder: Path, documents: Documents, kind: str = "uint16", name: str = "a_text_document") -> None:
    """Write Megatron-LM's ``.bin`` and ``.idx``; every third document of two sequences."""
    sequences: list[np.ndarray] = []
    firsts = [0]
    for number, ids in enumerate(documents):
        sequences += np.split(ids, [len(ids) // 2]) if number % 3 == 0 else [ids]
        firsts.append(len(sequences))
    code = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[kind]
    lengths = np.array([len(one) for one in sequences], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * np.dtype(kind).itemsize]).astype("<i8")
    (folder / f"{name}.bin").write_bytes(b"".join(one.astype(kind).tobytes() for one in sequences))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    columns = lengths.tobytes() + pointers.tobytes() + np.array(firsts, dtype="<i8").tobytes()
    (folder / f"{name}.idx").write_bytes(head + columns)


def chunk(samples: Sequence[bytes], columns: bytes = b"") -> bytes:
    """Return a file of samples: MDS with ``columns``, litdata without."""
    begin = 4 * (len(samples) + 2) + len(columns)
    offsets = begin + np.concatenate([[0], np.cumsum([len(one) for one in samples], dtype=np.int64)])
    return struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + columns + b"".join(samples)


def mds(
    folder: Path, documents: Documents, encoding: str = "ndarray:uint16", packed: str = "", shards: int = 2
) -> None:
    """Write an MDS folder with columns ``n`` and ``tokens``."""
    config: dict[str, Any] = {
        "column_encodings": ["int", encoding],
        "column_names": ["n", "tokens"],
        "column_sizes": [8, None],
        "compression": packed or None,
        "format": "mds",
        "hashes": [],
        "size_limit": 2**26,
        "version": 2,
    }
    entries = []
    for shard in range(shards):
        samples = []
        for number, ids in enumerate(documents[shard::shards]):
            value = _mds_value(ids, encoding)
            samples.append(struct.pack("<I", len(value)) + struct.pack("<q", number) + value)
        data, name = chunk(samples, json.dumps(config, sort_keys=True).encode()), f"shard.{shard:05d}.mds"
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        zipped = None
        if packed:
            data = bytes(pa.Codec("zstd").compress(data, asbytes=True))
            zipped = {"basename": f"{name}.{packed}", "bytes": len(data), "hashes": {}}
        (folder / (zipped or raw)["basename"]).write_bytes(data)
        entries.append({**config, "raw_data": raw, "samples": len(samples), "zip_data": zipped})
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))


def _mds_value(ids: np.ndarray, encoding: str) -> bytes:
    if encoding == "bytes":
        return ids.astype("<i8").tobytes()
    if encoding == "ndarray":  # type, number of dimensions and type of the shape, shape
        return bytes([33, 1 << 2 | 1]) + struct.pack("<H", len(ids)) + ids.astype("<i4").tobytes()
    assert encoding == "ndarray:uint16"
    return bytes([1 << 2 | 2]) + struct.pack("<I", len(ids)) + ids.astype("<u2").tobytes()


def litdata(folder: Path, documents: Documents, loader: str = "TokensLoader", chunks: int = 2) -> None:
    """Write a litdata folder of int32 tensors."""
    entries = []
    for number in range(chunks):
        mine = [ids.astype("<i4").tobytes() for ids in documents[number::chunks]]
        samples = mine if loader == "TokensLoader" else [struct.pack("<I", len(one)) + one for one in mine]
        data, name = chunk(samples), f"chunk-{number}-0.bin"
        (folder / name).write_bytes(data)
        tokens = sum(len(ids) for ids in documents[number::chunks]) if loader == "TokensLoader" else None
        entries.append({"chunk_bytes": len(data), "chunk_size": len(samples), "filename": name, "dim": tokens})
    config = {"compression": None, "chunk_size": None, "chunk_bytes": 2**26, "data_format": ["no_header_tensor:16"]}
    config |= {"data_spec": '[1, {"type": null, "context": null, "children_spec": []}]', "encryption": None}
    index = {"chunks": entries, "config": {**config, "item_loader": loader}, "updated_at": "0"}
    (folder / "index.json").write_text(json.dumps(index))


def array(documents: Documents, end_of_text: int, kind: str = "uint16", end_first: bool = False) -> np.ndarray:
    """Return the documents end to end, an end-of-text id after or before each."""
    end = np.array([end_of_text])
    return np.concatenate([part for ids in documents for part in ((end, ids) if end_first else (ids, end))]).astype(
        kind
    )


def llm_c(file: Path, ids: np.ndarray) -> None:
    """Write llm.c's ``.bin``."""
    magic, version = {2: (20240520, 1), 4: (20240801, 7)}[ids.itemsize]
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids)
    file.write_bytes(header.tobytes() + ids.tobytes())


def records(folder: Path, documents: Documents, name: str) -> None:
    """Write JSON lines or Parquet with a column ``input_ids``."""
    lists = [ids.tolist() for ids in documents]
    if name.endswith(".parquet"):
        column = pa.array(lists, pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": column, "n": list(range(len(lists)))}), folder / name, row_group_size=50)
    else:
        (folder / name).write_text("".join(json.dumps({"input_ids": one, "n": 1}) + "\n" for one in lists))
