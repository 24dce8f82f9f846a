"""Recognise and read files that hold token ids instead of text. File names and index files in their folder tell the format.

X.idx, X.bin                      Megatron-LM's indexed dataset
*.mds, also compressed            mosaicml-streaming (MDS)
index.json with "chunks", *.bin   litdata's tokens
*.npy, any other *.bin            one array of ids, in which one document follows another
a list of whole numbers           a field of a JSON or Parquet record: read in sources.py
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import posixpath
import re
import struct
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from springtide.corpus.documents import MOST_TOKENS, Broken, Document, Tokens, too_long, unreadable
from springtide.corpus.tokenizer import Tokenizer
from springtide.storage import Folder
from springtide.storage.local_files import stays_inside

_KINDS = {".idx": "megatron", ".mds": "mds", ".npy": "array", ".bin": "array"}
_PACKED = {".zstd": "zstd", ".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_LITDATA = re.compile(r"/?chunk-\d+-\d+(\.[a-z0-9:]+)?\.bin")
"""Matches the file name of a litdata chunk. Without this check, a chunk whose index is missing would be read as a raw array,
with its header as token ids."""
_IDS, _TEXT = "input_ids", "text"


def is_tokens(name: str) -> bool:
    """Return True if a file of this name holds token ids."""
    return bool(_kind(name))


def _kind(name: str) -> str:
    plain, suffix = posixpath.splitext(name)
    return _KINDS.get(posixpath.splitext(plain)[1].lower() if suffix.lower() in _PACKED else suffix.lower(), "")


def field_of(field: str, names: Collection[str]) -> str:
    """Return the field of a record to read: ``field``. If ``field`` is the default ``text`` and ``names`` lack it, but have
    ``input_ids``, return ``input_ids``."""
    return _IDS if field == _TEXT and _TEXT not in names and _IDS in names else field


def ids_of(value: Any) -> np.ndarray | None:
    """Return a JSON value as an int64 array if it is a list of whole numbers, else None."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        return None
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        return None


def is_ids(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of whole numbers."""
    return any(is_kind(kind) for is_kind in _LISTS) and pa.types.is_integer(kind.value_type)


def with_indexes(folder: Folder, names: tuple[str, ...], has_all: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split ``names`` into files to read as documents, and files that are needed to read these: each ``index.json``, and the
    ``.bin`` of each ``.idx``.

    Args:
        has_all: whether ``names`` are all files of the folder. If False, index and ``.bin`` files that ``names`` lack are also
            looked up in the folder.

    Raises:
        CorpusError: an index cannot be read, or lists a file that does not exist.
    """
    listed = set(names)

    def is_there(name: str, beside: str) -> bool:
        return name in listed or (not has_all and folder.exists(name) and _is_beside(folder, name, beside))

    found, beside = set(names), set[str]()
    for name in names:
        stem, suffix = posixpath.splitext(name)
        if suffix == ".idx":
            beside.add(data := megatron_data(name))
            if not is_there(data, name):
                raise unreadable(folder.where(name), f"{data}, which holds its tokens, is not in the source")
        elif suffix == ".bin" and is_there(f"{stem}.idx", name):
            beside.add(name)
            found.add(f"{stem}.idx")
    found -= beside
    folders = {posixpath.dirname(name): name for name in sorted(found) if _kind(name) == "mds" or name.endswith(".bin")}
    for name, member in sorted((posixpath.join(one, INDEX), name) for one, name in folders.items()):
        index = read_index(folder, name) if is_there(name, member) else {}
        if index:
            _apply(folder, name, index, found, listed)
            beside.add(name)
        elif chunk := next(
            (one for one in sorted(found) if _LITDATA.fullmatch(one, len(posixpath.dirname(name)))), None
        ):
            raise unreadable(folder.where(chunk), f"a chunk of a litdata dataset, without the {INDEX} that lists it")
    return tuple(sorted(found - beside)), tuple(sorted(beside))


def _is_beside(folder: Folder, name: str, beside: str) -> bool:
    """Return True if the file ``name``, which the source does not list, may be read. A link out of the source is allowed only
    if it leads to the folder that also holds the target of the listed file ``beside``. In a source made by others, any other
    link may lead to a private file of this machine."""
    if not folder.is_local:
        return True
    path, real = folder.where(name), posixpath.dirname(os.path.realpath(folder.where(beside)))
    return stays_inside(path, folder.path) or posixpath.dirname(os.path.realpath(path)) == real


def _apply(folder: Folder, name: str, index: dict[str, Any], found: set[str], listed: set[str]) -> None:
    """Remove from ``found`` the shards or chunks that their index does not list. If a shard exists both raw and compressed,
    keep only the raw file. ``name``: name of the index file; ``index``: its content; ``listed``: all files of the source."""
    if "shards" in index:
        entries = mds_shards(folder, name, index)
    else:
        entries = [(chunk,) for chunk in litdata_chunks(folder, name, index)[1]]
    wanted: set[str] = set()
    for number, names in enumerate(entries):
        there = [one for one in names if one in listed]
        if not there and name in listed:
            field = f"{'shards' if 'shards' in index else 'chunks'}[{number}]"
            raise unreadable(
                folder.where(name), f"{field}: {' or '.join(names)[:200] or 'no file'} is not in the source"
            )
        wanted.update(there[:1])
    mine = {one for one in found if posixpath.dirname(one) == posixpath.dirname(name)}
    found -= {one for one in mine if (_kind(one) == "mds" or one.endswith(".bin")) and one not in wanted}


def litdata_layouts(folder: Folder, beside: tuple[str, ...]) -> dict[str, str]:
    """Return the layout (``LOADER:TYPE:COMPRESSION``) of each litdata chunk, by its file name. ``beside``: names of index
    files; each litdata ``index.json`` among them lists chunks."""
    layouts: dict[str, str] = {}
    for name in beside:
        if posixpath.basename(name) == INDEX and "chunks" in (index := read_index(folder, name)):
            layout, chunks = litdata_chunks(folder, name, index)
            layouts |= dict.fromkeys(chunks, layout)
    return layouts


def ranges(folder: Folder, name: str, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a file of token ids into ranges [begin, end) of about ``unit_bytes``, each of which can be read alone. For an array,
    ``begin`` and ``end`` count bytes; for a Megatron-LM dataset, documents. Any other file is one range, (0, -1)."""
    kind = _kind(name)
    if kind == "megatron":
        total = num_megatron_documents(folder, name)
        step = max(1, total * unit_bytes // max(1, folder.size(megatron_data(name))))
    elif kind == "array":
        total, step = folder.size(name), unit_bytes
    else:
        yield 0, -1
        return
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def read(
    folder: Folder, name: str, span: tuple[int, int], layout: str, field: str, vocabulary: Tokenizer | None
) -> Iterator[Document | Broken | Tokens]:
    """Yield the records of a file that are in ``span``, one of the ranges that ``ranges`` returned for the file. If
    ``vocabulary`` is None, Megatron-LM and array files yield nothing, because a tokenizer is needed to decode their ids.

    Args:
        layout: layout of a litdata chunk, ``LOADER:TYPE:COMPRESSION``; empty for other files.
        field: the column of MDS samples to read, which may hold text.
    """
    where, packed = folder.where(name), _PACKED.get(posixpath.splitext(name)[1].lower(), "")
    if layout:
        with _opened(folder, name, layout.rpartition(":")[2]) as file:
            yield from read_litdata(file, where, name, layout)
    elif _kind(name) == "mds":
        with _opened(folder, name, packed) as file:
            yield from read_mds(file, where, name, field)
    elif vocabulary is None:
        return
    elif packed:
        raise unreadable(where, "files of token ids in this format must not be compressed: decompress it")
    elif _kind(name) == "megatron":
        yield from read_megatron(folder, name, *span)
    else:
        yield from read_array(folder, name, *span, vocabulary)


@contextlib.contextmanager
def _opened(folder: Folder, name: str, packed: str) -> Iterator[IO[bytes]]:
    with folder.open(name) as file:
        yield io.BufferedReader(pa.CompressedInputStream(file, packed)) if packed else file


# Read Megatron-LM's indexed datasets. ``X.bin`` holds the token ids of all documents, one after another. ``X.idx`` holds the
# position of each document. It has a header and three columns; u and i are unsigned and signed integers of 1, 4 or 8 bytes:
#
# X.idx   "MMIDIDX" 0 0 | version = 1, u8 | code of the id's type, u1 | sequences, u8 | documents + 1, u8
# length of each sequence, i4 | its place in X.bin, i8 [bytes] | first sequence of each document, i8
#
# Source: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code in the header of an ``.idx`` -> numpy type of a token id. Codes 6 and 7 are missing: they are floating-point types."""
_DOCUMENTS_AT_ONCE = 1024
_MOST_SEQUENCES = 2**22
"""Maximum number of sequences in the 1,024 documents that are read at once. A document usually has one sequence."""


class _MegatronIndex(NamedTuple):
    folder: Folder
    name: str
    kind: np.dtype
    sequences: int
    documents: int
    has_documents: bool
    """Whether the index groups sequences into documents. If False, each sequence is a document."""

    @property
    def where(self) -> str:
        return self.folder.where(self.name)

    def column(self, number: int, begin: int, end: int) -> np.ndarray:
        """Return the values [begin, end) of a column of the index. Column 0: length of each sequence in ids. Column 1: position
        of each sequence in the ``.bin`` [bytes]. Column 2: index of the first sequence of each document."""
        start = _HEADER.size + (0, 4, 12)[number] * self.sequences
        kind = np.dtype("<i4" if number == 0 else "<i8")
        data = self.folder.read_range(self.name, start + begin * kind.itemsize, start + end * kind.itemsize)
        if len(data) < (end - begin) * kind.itemsize:
            raise unreadable(self.where, "the file ends inside its columns")
        return np.frombuffer(data, dtype=kind)


def megatron_data(name: str) -> str:
    """Return the name of the ``.bin`` file that belongs to an ``.idx`` file."""
    return name[: -len(".idx")] + ".bin"


def num_megatron_documents(folder: Folder, name: str) -> int:
    """Return the number of documents that an ``.idx`` lists. Raises CorpusError if it is not an index of Megatron-LM."""
    return _megatron_index(folder, name).documents


def read_megatron(folder: Folder, name: str, begin: int, end: int) -> Iterator[Tokens | Broken]:
    """Yield the documents [begin, end) that an ``.idx`` lists, with their ids from the ``.bin``. If ``end`` is -1, read to the
    last document. Raises CorpusError if the ``.idx`` and the ``.bin`` do not match."""
    index = _megatron_index(folder, name)
    size = folder.size(megatron_data(name))
    end = index.documents if end < 0 else end
    for first in range(begin, end, _DOCUMENTS_AT_ONCE):
        last = min(first + _DOCUMENTS_AT_ONCE, end)
        bounds = index.column(2, first, last + 1) if index.has_documents else np.arange(first, last + 1)
        low, high = int(bounds[0]), int(bounds[-1])
        if low < 0 or high > index.sequences or (np.diff(bounds) < 0).any():
            limit = f"documents {first} to {last} begin at sequences {low} to {high} of {index.sequences}"
            raise unreadable(index.where, f"document indices: {limit}")
        if high - low > _MOST_SEQUENCES:
            raise unreadable(index.where, f"document indices: {high - low} sequences in {last - first} documents")
        lengths = index.column(0, low, high).astype(np.int64)
        places = index.column(1, low, high)
        wrong = (lengths < 0) | (places < 0) | (places > size - lengths * index.kind.itemsize)
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            limit = f"length {lengths[bad]} at byte {places[bad]}, {megatron_data(name)} has {size} bytes"
            raise unreadable(index.where, f"sequence {low + bad}: {limit}")
        total, ends = int(lengths.sum()), places + lengths * index.kind.itemsize
        if (
            len(places) and total <= MOST_TOKENS and (places[1:] == ends[:-1]).all()
        ):  # the usual case: one sequence follows another without gaps, so one request reads all
            whole = _megatron_document(index, first, places[:1], lengths.sum(keepdims=True))
            offsets = np.concatenate([[0], np.cumsum(lengths)])[bounds - low]
            for number, piece in enumerate(np.split(whole, offsets[1:-1]), first):
                yield Tokens(f"{name}@{number}", piece)
            continue
        for number, (one, after) in enumerate(itertools.pairwise((bounds - low).tolist()), first):
            if lengths[one:after].sum() > MOST_TOKENS:
                yield too_long(f"{name}@{number}", np.empty(0, index.kind))
            else:
                yield Tokens(
                    f"{name}@{number}", _megatron_document(index, number, places[one:after], lengths[one:after])
                )


def _megatron_document(index: _MegatronIndex, document: int, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Read sequences from the ``.bin`` and return their ids, joined. ``places``: position of each sequence [bytes];
    ``lengths``: number of its ids; ``document``: number of the document that the first sequence belongs to, for errors."""
    width, data_file = index.kind.itemsize, megatron_data(index.name)
    data = b"".join(
        index.folder.read_range(data_file, place, place + length * width)
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True)
        if length
    )
    if len(data) != int(lengths.sum()) * width:
        raise unreadable(index.folder.where(data_file), f"the file ends in document {document} or after it")
    return np.frombuffer(data, dtype=index.kind)


def _megatron_index(folder: Folder, name: str) -> _MegatronIndex:
    where, size = folder.where(name), folder.size(name)
    head = bytes(folder.read_range(name, 0, _HEADER.size))
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise unreadable(where, f"header: it begins with {head[:9]!r}, not with {_MAGIC!r} as in Megatron-LM")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != 1:
        raise unreadable(where, f"header: version {version}, only 1 is known")
    if code not in _TYPES:
        raise unreadable(where, f"header: type {code} of a token is unknown, known are {', '.join(map(str, _TYPES))}")
    if _HEADER.size + 12 * sequences + 8 * documents > size:
        raise unreadable(where, f"header: {sequences} sequences and {documents} documents do not fit {size} bytes")
    has_documents = documents > 1
    count = documents - 1 if has_documents else sequences
    return _MegatronIndex(folder, name, np.dtype(_TYPES[code]), sequences, count, has_documents)


# Read samples from files that mosaicml-streaming (MDS) and litdata wrote. Layout of a file; u4 is an unsigned integer of 4
# bytes:
#
# number of samples, u4 | number + 1 offsets, u4 [bytes] | only in MDS: the columns as JSON | the samples
#
# Sources: mosaicml/streaming, ``streaming/base/format/mds``; Lightning-AI/litdata, ``litdata/streaming/writer.py``.

INDEX = "index.json"
_MOST_SAMPLES = 2**24
_MOST_BYTES = 8 * MOST_TOKENS
"""Maximum size of an MDS or litdata sample [bytes]."""
_MOST_COLUMNS_BYTES = 2**20
_ID_COLUMNS = ("input_ids", "tokens")
_SCALARS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Code of a type in MDS -> numpy type. If a column's encoding lacks the type of its arrays, this code precedes each array."""
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
"""Name of a data format in litdata -> numpy type of a token. Only one-dimensional tensors or arrays of whole numbers."""

Sample = Document | Broken | Tokens


def read_mds(file: IO[bytes], where: str, name: str, field: str) -> Iterator[Sample]:
    """Yield the texts or token ids in the column ``field`` of an MDS shard. Raises CorpusError if the file is not an MDS shard.

    If ``field`` is the default ``text`` and the shard has no column ``text``, read the column ``input_ids`` or ``tokens``.
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
            raise unreadable(where, f"sample {number}: {len(data)} bytes, too few for the {len(variable)} column sizes")
        given = dict(zip(variable, struct.unpack_from(f"<{len(variable)}I", data), strict=True))
        lengths = [given[column] if size is None else size for column, size in enumerate(sizes)]
        begin = 4 * len(variable) + sum(lengths[:place])
        if begin + lengths[place] > len(data):
            raise unreadable(where, f"sample {number}: column {wanted!r} ends after the end of the sample")
        yield _value(decode, f"{name}@{number}", data[begin : begin + lengths[place]], where)


def _value(decode: Callable[[bytes], np.ndarray | str], name: str, data: bytes, where: str) -> Sample:
    try:
        value = decode(data)
    except (ValueError, IndexError, TypeError) as error:
        raise unreadable(where, f"sample {name.rpartition('@')[2]}: {str(error)[:200]}") from None
    return Document(name, value) if isinstance(value, str) else Tokens(name, value)


def litdata_chunks(folder: Folder, name: str, index: dict[str, Any]) -> tuple[str, list[str]]:
    """Return how to read a litdata folder, ``LOADER:TYPE:COMPRESSION``, and the names of its chunks. ``name``: name of the
    folder's ``index.json``; ``index``: its content, from ``read_index``. Raises CorpusError unless each sample is one
    one-dimensional tensor or array of whole numbers."""
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
    """Yield the samples of a litdata chunk. ``layout``: ``LOADER:TYPE:COMPRESSION``, from ``litdata_chunks``. Raises
    CorpusError if the file is not a chunk of this layout."""
    loader, kind, _ = layout.split(":")
    offsets = _offsets(file, where)
    if int(offsets[0]) != 4 * (len(offsets) + 1):
        raise unreadable(where, f"offset of the first sample: {offsets[0]} after {len(offsets)} offsets")
    for number, data in _samples(file, offsets, where):
        if loader == "pytree":
            if len(data) < 4 or struct.unpack_from("<I", data)[0] != len(data) - 4:
                raise unreadable(where, f"sample {number}: its header does not say {len(data) - 4} bytes")
            data = data[4:]
        if len(data) % np.dtype(kind).itemsize:
            raise unreadable(where, f"sample {number}: {len(data)} bytes are not whole ids of type {kind}")
        yield Tokens(f"{name}@{number}", np.frombuffer(data, dtype=kind))


def mds_shards(folder: Folder, name: str, index: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the file names of each shard in an MDS ``index.json``: the raw file, the compressed file, or both if both are
    listed. ``name``: name of the ``index.json``; ``index``: its content, from ``read_index``."""

    def names(shard: dict[str, Any]) -> list[str]:
        if shard["format"] != "mds":
            raise ValueError(f"format {str(shard['format'])[:50]!r}, only mds is read")
        return [shard[key]["basename"] for key in ("raw_data", "zip_data") if shard.get(key)]

    found = _listed(folder.where(name), index["shards"], names, "shards")
    return [tuple(posixpath.join(posixpath.dirname(name), one) for one in shard) for shard in found]


def read_index(folder: Folder, name: str) -> dict[str, Any]:
    """Return the content of an MDS or litdata ``index.json``. Return {} if the file is of neither format."""
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
    """Read ``size`` bytes, 1 MiB at a time. If a wrong header claims gigabytes, no more memory is allocated than the file has
    bytes. Raises CorpusError if the file ends earlier."""
    parts: list[bytes] = []
    left = size
    while left and (part := file.read(min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    if left:
        raise unreadable(where, f"the file ends {left} bytes too early, by its header")
    return b"".join(parts)


def _columns(data: bytes, where: str) -> tuple[list[str], list[str], list[int | None]]:
    try:
        record = json.loads(data)
        names, encodings, sizes = (record[f"column_{key}"] for key in ("names", "encodings", "sizes"))
        if record["version"] != 2 or record["format"] != "mds":
            raise ValueError(f"version {record['version']!r} of {record['format']!r}, only 2 of 'mds' is known")
        if not len(names) == len(encodings) == len(sizes) <= 1000:
            raise ValueError("the numbers of column names, encodings and sizes differ")
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
    if name == "bytes":  # early versions of llm-foundry store each token id as 8 bytes
        return lambda data: np.frombuffer(data, "<i8")
    if name == "ndarray" and (not kind or kind in _NAMES):
        return lambda data: _array(data, kind, bool(shape))
    readable = "str, bytes of 8 bytes an id, or ndarray of whole numbers"
    raise unreadable(where, f"column {column!r}: encoding {encoding[:100]!r} is unknown, known are {readable}")


def _array(data: bytes, kind: str, has_shape: bool) -> np.ndarray:
    """Return the values of an MDS ``ndarray``. If the column's encoding lacks the type (``kind`` is empty) or the shape, the
    missing type or shape precedes the values in ``data``."""
    place, found = (0, _NAMES[kind]) if kind else (1, _SCALARS.get(data[0], ""))
    if not found:
        raise ValueError(f"type code {data[0]} of a value is not a type of whole numbers")
    if not has_shape:
        place += 1 + (data[place] >> 2) * 2 ** (data[place] & 3)
    return np.frombuffer(data[place:], dtype=found)


# Read one array with the token ids of all documents, one after another: ``.npy``, raw ``.bin`` (nanoGPT), ``.bin`` with llm.c's
# header.
#
# A document ends at an end-of-text id. The array is read in ranges. A document belongs to the range that holds its first
# token, and is read to its end.

_HEAD_BYTES = 2**17
_READ_TOKENS = 2**19
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""(magic number, version) in the header -> numpy type of a token. Source: karpathy/llm.c, ``dev/data/data_common.py``."""
_LLM_C_HEADER = 1024


class _Array(NamedTuple):
    folder: Folder
    name: str
    begin: int
    """Position in the file at which the token ids begin, after the header [bytes]."""
    kind: np.dtype
    tokens: int

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end) of the array, or fewer if the array ends before ``end``. Raises CorpusError if the file is
        shorter than its header says."""
        places = (self.begin + self.kind.itemsize * min(place, self.tokens) for place in (begin, end))
        found = np.frombuffer(self.folder.read_range(self.name, *places), dtype=self.kind)
        if len(found) < min(end, self.tokens) - begin:
            raise unreadable(
                self.folder.where(self.name), f"it ends after {begin + len(found)} of {self.tokens} tokens"
            )
        return found


def read_array(folder: Folder, name: str, begin: int, end: int, vocabulary: Tokenizer) -> Iterator[Tokens | Broken]:
    """Yield the documents whose first token is in bytes [begin, end) of the file. If ``end`` is -1, read to the end of the
    file. Raises CorpusError if the header cannot be read."""
    array = _open(folder, name, vocabulary)
    first, last = (
        array.tokens if place < 0 else min(max(0, -(-(place - array.begin) // array.kind.itemsize)), array.tokens)
        for place in (begin, end)
    )
    place = _next(array, first - 1, last, vocabulary.end_of_text) if first else 0
    while place < last:
        document, length = _document(array, place, vocabulary.end_of_text)
        if length > MOST_TOKENS:
            yield too_long(f"{name}@{place}", document)
            place = _next(array, place + length, last, vocabulary.end_of_text)
        else:
            if length:
                yield Tokens(f"{name}@{place}", document)
            place += length + 1


def _next(array: _Array, begin: int, end: int, end_of_text: int) -> int:
    """Return the index after the first end-of-text id in tokens [begin, end), or ``end`` if there is none."""
    for place in range(begin, end, _READ_TOKENS):
        found = np.flatnonzero(array.read(place, min(place + _READ_TOKENS, end)) == end_of_text)
        if len(found):
            return place + int(found[0]) + 1
    return end


def _document(array: _Array, begin: int, end_of_text: int) -> tuple[np.ndarray, int]:
    """Return the ids of the document that begins at ``begin``, without its end-of-text id, and their number. If a document has
    more than ``MOST_TOKENS`` ids, stop early: return its first ids, and any number above ``MOST_TOKENS``."""
    found: list[np.ndarray] = []
    length, step = 0, 4096
    while length <= MOST_TOKENS and begin + length < array.tokens:
        part = array.read(begin + length, begin + length + step)
        ends = np.flatnonzero(part == end_of_text)
        part = part[: int(ends[0])] if len(ends) else part
        found.append(part)
        length += len(part)
        if len(ends):
            break
        step = _READ_TOKENS
    return np.concatenate(found) if found else np.empty(0, array.kind), length


def _open(folder: Folder, name: str, vocabulary: Tokenizer) -> _Array:
    size = folder.size(name)
    head = bytes(folder.read_range(name, 0, min(size, _HEAD_BYTES)))
    begin, kind, tokens = _numpy(folder.where(name), head) if name.lower().endswith(".npy") else _raw(head, vocabulary)
    held = (size - begin) // kind.itemsize
    if (size - begin) % kind.itemsize and tokens < 0:
        raise unreadable(folder.where(name), f"its {size} bytes are not whole ids of {kind.itemsize} bytes")
    if tokens > held:
        raise unreadable(folder.where(name), f"its header says {tokens} ids, the file holds {held}")
    return _Array(folder, name, begin, kind, held if tokens < 0 else tokens)


def _raw(head: bytes, vocabulary: Tokenizer) -> tuple[int, np.dtype, int]:
    """Return (position of the first id in a raw ``.bin`` [bytes], type of an id, number of ids). The number -1 means that ids
    fill the rest of the file.

    A file without a header does not name the type. It is uint32 if the tokenizer has ids above 65,535, or if the upper 16 bits
    of every uint32 in ``head``, the first bytes of the file, are zero. Otherwise it is uint16."""
    if len(head) >= _LLM_C_HEADER:
        magic, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
        if kind := _LLM_C.get((magic, version)):
            return _LLM_C_HEADER, np.dtype(kind), max(0, tokens)
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    is_wide = vocabulary.size > 2**16 or (len(halves) > 1 and not halves[:, 1].any() and bool(halves[:, 0].any()))
    return 0, np.dtype("<u4" if is_wide else "<u2"), -1


def _numpy(where: str, head: bytes) -> tuple[int, np.dtype, int]:
    """Return (position of the first id in a ``.npy`` file [bytes], type of an id, number of ids)."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, is_fortran, kind = read(file)
    except Exception as error:  # numpy parses the header as Python, so a bad header may raise any error
        raise unreadable(where, f"header: {str(error)[:200]}") from None
    if kind.kind not in "iu" or is_fortran or any(not isinstance(length, int) or length < 0 for length in shape):
        raise unreadable(where, f"header: it holds {kind} in shape {str(shape)[:100]}, not whole numbers in C order")
    tokens = 1
    for length in shape:
        tokens *= length
    return file.tell(), kind, tokens
