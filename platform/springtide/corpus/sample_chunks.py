"""Read samples of files that mosaicml-streaming (MDS) and litdata wrote.

    number of samples, u4 | number + 1 offsets, u4 [bytes] | of MDS: its columns, JSON | the samples

Sources: mosaicml/streaming, ``streaming/base/format/mds``; Lightning-AI/litdata, ``litdata/streaming/writer.py``.
"""

from __future__ import annotations

import json
import posixpath
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from springtide.corpus.documents import MOST_TOKENS, Broken, Document, Tokens, unreadable
from springtide.storage import Folder

INDEX = "index.json"
_MOST_SAMPLES = 2**24
_MOST_BYTES = 8 * MOST_TOKENS
"""Most bytes of a sample."""
_MOST_COLUMNS_BYTES = 2**20
_ID_COLUMNS = ("input_ids", "tokens")
_SCALARS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""MDS's code of a type -> type."""
_NAMES = {
    "uint8": "u1",
    "int8": "i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}
_TENSORS = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_ARRAYS = dict(enumerate(("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8")))
_FORMATS = {f"no_header_tensor:{code}": kind for code, kind in _TENSORS.items()} | {
    f"no_header_numpy:{code}": kind for code, kind in _ARRAYS.items()
}
"""litdata's data format of a one-dimensional tensor or array of whole numbers -> type of a token."""

Sample = Document | Broken | Tokens


def read_mds(file: IO[bytes], where: str, name: str, field: str) -> Iterator[Sample]:
    """Yield the samples of an MDS shard: texts or token ids of the column ``field``; CorpusError if it is none.

    If there is no column ``text``, the default, the ids are those of ``input_ids`` or of ``tokens``.
    """
    offsets = _offsets(file, where)
    columns_bytes = int(offsets[0]) - 4 * (len(offsets) + 1)
    if not 0 < columns_bytes <= _MOST_COLUMNS_BYTES:
        raise unreadable(where, f"offset of the first sample: {offsets[0]} after {len(offsets)} offsets")
    names, encodings, sizes = _columns(_exactly(file, columns_bytes, where), where)
    wanted = next((one for one in (field, *(_ID_COLUMNS if field == "text" else ())) if one in names), None)
    if wanted is None:
        raise unreadable(where, f"columns: no {field!r} among {', '.join(names)[:300]}; set corpus.field")
    place = names.index(wanted)
    decode = _decoder(encodings[place], where, wanted)
    variable = [number for number, size in enumerate(sizes) if size is None]
    for number, data in _samples(file, offsets, where):
        if len(data) < 4 * len(variable):
            raise unreadable(where, f"sample {number}: {len(data)} bytes for the sizes of {len(variable)} columns")
        given = dict(zip(variable, struct.unpack_from(f"<{len(variable)}I", data), strict=True))
        lengths = [given[column] if size is None else size for column, size in enumerate(sizes)]
        begin = 4 * len(variable) + sum(lengths[:place])
        if begin + lengths[place] > len(data):
            raise unreadable(where, f"sample {number}: column {wanted!r} ends after the sample")
        yield _value(decode, f"{name}@{number}", data[begin : begin + lengths[place]], where)


def _value(decode: Callable[[bytes], np.ndarray | str], name: str, data: bytes, where: str) -> Sample:
    try:
        value = decode(data)
    except (ValueError, IndexError, TypeError) as error:
        raise unreadable(where, f"sample {name.rpartition('@')[2]}: {str(error)[:200]}") from None
    return Document(name, value) if isinstance(value, str) else Tokens(name, value)


def litdata_chunks(folder: Folder, name: str, index: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the layout of a litdata folder, and the names of its chunks. Token datasets have one leaf, a one-dimensional
    tensor or array: CorpusError for any other. ``index``: what ``read_index`` finds in ``name``."""
    where = folder.where(name)
    config = index["config"] if isinstance(index.get("config"), dict) else {}
    formats, compression = config.get("data_format"), config.get("compression") or ""
    if config.get("encryption"):
        raise unreadable(where, "config.encryption: it is encrypted")
    kind = _FORMATS.get(str(formats[0])) if isinstance(formats, list) and len(formats) == 1 else None
    if kind is None:
        limit = "not one 1-dimensional tensor or array of whole numbers"
        raise unreadable(where, f"config.data_format: {str(formats)[:200]} is {limit}")
    packed = str(compression).partition(":")[0]
    if packed not in ("", "zstd"):
        raise unreadable(where, f"config.compression: {packed[:100]!r}, only zstd is read")
    loader = "tokens" if config.get("item_loader") == "TokensLoader" else "pytree"
    chunks = _listed(where, index["chunks"], lambda chunk: [chunk["filename"]], "chunks")
    return f"{loader}:{kind}:{packed}", [posixpath.join(posixpath.dirname(name), one) for [one] in chunks]


def read_litdata(file: IO[bytes], where: str, name: str, layout: str) -> Iterator[Tokens]:
    """Yield the samples of a litdata chunk; ``layout``: as ``litdata_chunks`` returns. CorpusError if it is none."""
    loader, kind, _ = layout.split(":")
    offsets = _offsets(file, where)
    if int(offsets[0]) != 4 * (len(offsets) + 1):
        raise unreadable(where, f"offset of the first sample: {offsets[0]} after {len(offsets)} offsets")
    for number, data in _samples(file, offsets, where):
        if loader == "pytree":
            if len(data) < 4 or struct.unpack_from("<I", data)[0] != len(data) - 4:
                raise unreadable(where, f"sample {number}: its size is not {len(data) - 4}")
            data = data[4:]
        if len(data) % np.dtype(kind).itemsize:
            raise unreadable(where, f"sample {number}: {len(data)} bytes are not whole ids of type {kind}")
        yield Tokens(f"{name}@{number}", np.frombuffer(data, dtype=kind))


def mds_shards(folder: Folder, name: str, index: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the files that an MDS ``index.json`` lists: for each shard the raw name and the compressed one, if there are.
    ``index``: what ``read_index`` finds in ``name``."""

    def names(shard: dict[str, Any]) -> list[str]:
        if shard["format"] != "mds":
            raise ValueError(f"format {str(shard['format'])[:50]!r}, only mds is read")
        return [shard[key]["basename"] for key in ("raw_data", "zip_data") if shard.get(key)]

    found = _listed(folder.where(name), index["shards"], names, "shards")
    return [tuple(posixpath.join(posixpath.dirname(name), one) for one in shard) for shard in found]


def read_index(folder: Folder, name: str) -> dict[str, Any]:
    """Return an ``index.json`` of either kind; an empty one if the file is something else."""
    try:
        value = folder.read_json(name)
    except ValueError as error:
        raise unreadable(folder.where(name), str(error)[:300]) from None
    return value if isinstance(value, dict) and ("shards" in value or "chunks" in value) else {}


def _listed(where: str, entries: Any, names: Callable[[dict[str, Any]], list[str]], field: str) -> list[list[str]]:
    if not isinstance(entries, list):
        raise unreadable(where, f"{field}: it is not a list")
    found: list[list[str]] = []
    for number, entry in enumerate(entries):
        try:
            mine = names(entry)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(where, f"{field}[{number}]: {str(error)[:200]}") from None
        for one in mine or [""]:
            if not isinstance(one, str) or one.startswith("/") or posixpath.normpath(one) != one or one[:2] == "..":
                raise unreadable(
                    where, f"{field}[{number}]: {str(one)[:100]!r} is not the name of a file in its folder"
                )
        found.append(mine)
    return found


def _offsets(file: IO[bytes], where: str) -> np.ndarray:
    [samples] = struct.unpack("<I", _exactly(file, 4, where))
    if samples > _MOST_SAMPLES:
        raise unreadable(where, f"number of samples: {samples}, at most {_MOST_SAMPLES} are read from one file")
    offsets = np.frombuffer(_exactly(file, 4 * (samples + 1), where), "<u4").astype(np.int64)
    sizes = np.diff(offsets)
    if (sizes < 0).any() or (sizes > _MOST_BYTES).any():
        bad = int(np.flatnonzero((sizes < 0) | (sizes > _MOST_BYTES))[0])
        raise unreadable(where, f"sample {bad}: from byte {offsets[bad]} to {offsets[bad + 1]}, {_MOST_BYTES} at most")
    return offsets


def _samples(file: IO[bytes], offsets: np.ndarray, where: str) -> Iterator[tuple[int, bytes]]:
    for number, size in enumerate(np.diff(offsets).tolist()):
        yield number, _exactly(file, size, where)


def _exactly(file: IO[bytes], size: int, where: str) -> bytes:
    """Read ``size`` bytes, in steps: memory is taken for what is there, not for what a header says."""
    parts: list[bytes] = []
    left = size
    while left and (part := file.read(min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    if left:
        raise unreadable(where, f"the file ends {left} bytes before the end of what its header says")
    return b"".join(parts)


def _columns(data: bytes, where: str) -> tuple[list[str], list[str], list[int | None]]:
    try:
        record = json.loads(data)
        names, encodings, sizes = (record[f"column_{key}"] for key in ("names", "encodings", "sizes"))
        if record["version"] != 2 or record["format"] != "mds":
            raise ValueError(f"version {record['version']!r} of {record['format']!r}, only 2 of 'mds' is known")
        if not len(names) == len(encodings) == len(sizes) <= 1000:
            raise ValueError("its columns have not as many names as encodings and sizes")
        if not all(isinstance(one, str) for one in (*names, *encodings)):
            raise ValueError("a name or an encoding is not text")
        if not all(size is None or (type(size) is int and 0 <= size <= _MOST_BYTES) for size in sizes):
            raise ValueError("a size is not a number of bytes")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise unreadable(where, f"columns: {str(error)[:200]}") from None
    return names, encodings, [size or None for size in sizes]


def _decoder(encoding: str, where: str, column: str) -> Callable[[bytes], np.ndarray | str]:
    name, _, given = encoding.partition(":")
    kind, _, shape = given.partition(":")
    if name == "str":
        return lambda data: data.decode("utf-8", "replace")
    if name == "bytes":  # llm-foundry's first layout: ids of 8 bytes
        return lambda data: np.frombuffer(data, "<i8")
    if name == "ndarray" and (not kind or kind in _NAMES):
        return lambda data: _array(data, kind, bool(shape))
    readable = "str, bytes of 8 bytes an id, or ndarray of whole numbers"
    raise unreadable(where, f"column {column!r}: encoding {encoding[:100]!r}, read are {readable}")


def _array(data: bytes, kind: str, has_shape: bool) -> np.ndarray:
    """Return the values of an ``ndarray``; the type and the shape stand before them unless the column says them."""
    place, found = (0, _NAMES[kind]) if kind else (1, _SCALARS.get(data[0], ""))
    if not found:
        raise ValueError(f"type {data[0]} of a value is not one of whole numbers")
    if not has_shape:
        place += 1 + (data[place] >> 2) * 2 ** (data[place] & 3)
    return np.frombuffer(data[place:], dtype=found)
