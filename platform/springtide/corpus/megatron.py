"""Read Megatron-LM's indexed datasets: ``X.bin`` holds token ids end to end, ``X.idx`` where each document lies.

    X.idx   "MMIDIDX" 0 0 | version = 1, u8 | code of the id's type, u1 | sequences, u8 | documents + 1, u8
            length of each sequence, i4 | its place in X.bin, i8 [bytes] | first sequence of each document, i8

Source: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from springtide.corpus.documents import MOST_TOKENS, Broken, Tokens, too_long, unreadable
from springtide.storage import Folder

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code -> type; 6 and 7 are floating-point numbers."""
_DOCUMENTS_AT_ONCE = 1024
_MOST_SEQUENCES = 2**22
"""Most sequences of the documents that are read together; a document usually has one."""


class _Index(NamedTuple):
    folder: Folder
    name: str
    kind: np.dtype
    sequences: int
    documents: int
    has_documents: bool
    """Whether the file says which sequences belong together; else each is a document."""

    @property
    def where(self) -> str:
        return self.folder.where(self.name)

    def column(self, number: int, begin: int, end: int) -> np.ndarray:
        """Return values [begin, end) of the lengths (0), the places (1), or the documents (2)."""
        start = _HEADER.size + (0, 4, 12)[number] * self.sequences
        kind = np.dtype("<i4" if number == 0 else "<i8")
        data = self.folder.read_range(self.name, start + begin * kind.itemsize, start + end * kind.itemsize)
        if len(data) < (end - begin) * kind.itemsize:
            raise unreadable(self.where, "the file ends inside its columns")
        return np.frombuffer(data, dtype=kind)


def data_name(name: str) -> str:
    """Return the ``.bin`` of an ``.idx``."""
    return name[: -len(".idx")] + ".bin"


def num_documents(folder: Folder, name: str) -> int:
    """Return the number of documents that an ``.idx`` lists; CorpusError if it is none."""
    return _open(folder, name).documents


def read_documents(folder: Folder, name: str, begin: int, end: int) -> Iterator[Tokens | Broken]:
    """Yield documents [begin, end) of an ``.idx``; -1 is the last. CorpusError if it and the ``.bin`` do not fit together."""
    index = _open(folder, name)
    size = folder.size(data_name(name))
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
            limit = f"length {lengths[bad]} at byte {places[bad]}, {data_name(name)} has {size} bytes"
            raise unreadable(index.where, f"sequence {low + bad}: {limit}")
        total, ends = int(lengths.sum()), places + lengths * index.kind.itemsize
        if (
            len(places) and total <= MOST_TOKENS and (places[1:] == ends[:-1]).all()
        ):  # the usual layout: one read for all
            whole = _read(index, first, places[:1], lengths.sum(keepdims=True))
            offsets = np.concatenate([[0], np.cumsum(lengths)])[bounds - low]
            for number, piece in enumerate(np.split(whole, offsets[1:-1]), first):
                yield Tokens(f"{name}@{number}", piece)
            continue
        for number, (one, after) in enumerate(itertools.pairwise((bounds - low).tolist()), first):
            if lengths[one:after].sum() > MOST_TOKENS:
                yield too_long(f"{name}@{number}", np.empty(0, index.kind))
            else:
                yield Tokens(f"{name}@{number}", _read(index, number, places[one:after], lengths[one:after]))


def _read(index: _Index, document: int, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ids of some sequences, the first of which belongs to ``document``."""
    width, data_file = index.kind.itemsize, data_name(index.name)
    data = b"".join(
        index.folder.read_range(data_file, place, place + length * width)
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True)
        if length
    )
    if len(data) != int(lengths.sum()) * width:
        raise unreadable(index.folder.where(data_file), f"the file ends in document {document} or after it")
    return np.frombuffer(data, dtype=index.kind)


def _open(folder: Folder, name: str) -> _Index:
    where, size = folder.where(name), folder.size(name)
    head = bytes(folder.read_range(name, 0, _HEADER.size))
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise unreadable(where, f"header: it begins with {head[:9]!r}, an index of Megatron-LM with {_MAGIC!r}")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != 1:
        raise unreadable(where, f"header: version {version}, only 1 is known")
    if code not in _TYPES:
        raise unreadable(where, f"header: type {code} of a token, known are {', '.join(map(str, _TYPES))}")
    if _HEADER.size + 12 * sequences + 8 * documents > size:
        raise unreadable(where, f"header: {sequences} sequences and {documents} documents in {size} bytes")
    has_documents = documents > 1
    count = documents - 1 if has_documents else sequences
    return _Index(folder, name, np.dtype(_TYPES[code]), sequences, count, has_documents)
