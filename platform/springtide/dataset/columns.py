"""Store documents in a file of columns, which has one row per document. One ranged request reads a column, or a range of its
rows. Parts and segments, the temporary files of a preparation, are such files, with rows sorted by key.

    high, low      uint64   the two halves of the key: a keyed hash of the text, which decides the order
    share          uint64   a hash of the text, which decides whether the document is held out
    length         int32    number of tokens of the document
    sketch         128 bytes, to estimate the similarity of two documents
    signature      16 uint64: band hashes, which find similar documents; segments also store them in 16 columns, ``band0`` to
                   ``band15``
    tokens         the token ids of all documents, one document after another
    name_ends      int64    position in ``names`` at which the name of each document ends [bytes]
    names          the names of all documents, one after another, in UTF-8

The file has no header. The stage that writes the file also writes another file, which has the numbers of documents, tokens and
name bytes (``Sizes``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from springtide.corpus import BANDS, BINS
from springtide.errors import damaged
from springtide.storage import Folder

KEYS = (("high", "<u8"), ("low", "<u8"), ("share", "<u8"), ("length", "<i4"))
"""(name, type) of the columns that the plan reads, 28 bytes per document."""
Documents = dict[str, np.ndarray]
"""Name of a column -> its values: documents held in memory."""


class Sizes(NamedTuple):
    """Numbers of documents, tokens and name bytes in a file of columns."""

    documents: int
    tokens: int
    name_bytes: int


class Layout(NamedTuple):
    """Position of each column in a file, computed from the file's numbers of documents, tokens and name bytes."""

    sizes: Sizes
    token_type: str
    has_bands: bool
    """Whether the file also stores the band hashes in 16 columns, one per band. True for segments, False for parts."""

    def columns(self) -> Iterator[tuple[str, np.dtype, tuple[int, ...], int]]:
        """Yield (name, type, shape, position in the file [bytes]) of each column, in the order of the file. The last entry has
        an empty name; its position is the end of the file."""
        rows, place = self.sizes.documents, 0
        shapes: list[tuple[str, str, tuple[int, ...]]] = [
            *((name, kind, (rows,)) for name, kind in KEYS),
            ("sketch", "u1", (rows, BINS)),
            ("signature", "<u8", (rows, BANDS)),
            *((f"band{number}", "<u8", (rows,)) for number in range(BANDS if self.has_bands else 0)),
            ("tokens", np.dtype(self.token_type).newbyteorder("<").str, (self.sizes.tokens,)),
            ("name_ends", "<i8", (rows,)),
            ("names", "u1", (self.sizes.name_bytes,)),
        ]
        for name, kind, shape in shapes:
            yield name, np.dtype(kind), shape, place
            place += np.dtype(kind).itemsize * int(np.prod(shape))
        yield "", np.dtype("u1"), (), place

    @property
    def num_bytes(self) -> int:
        """Size of the file [bytes]."""
        return next(place for name, _, _, place in self.columns() if not name)

    def find(self, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
        """Return the type, the shape and the position in the file [bytes] of a column."""
        return next((kind, shape, place) for one, kind, shape, place in self.columns() if one == name)


class ColumnFile(NamedTuple):
    """A file that stores documents as columns, one after another."""

    work: Folder
    name: str
    layout: Layout

    def read_all(self) -> Documents:
        """Read the whole file in one request. Return every column except ``band0`` to ``band15``, which repeat
        ``signature``."""
        data = self._bytes(0, self.layout.num_bytes)
        return {
            name: _view(data, kind, shape, place)
            for name, kind, shape, place in self.layout.columns()
            if name and not name.startswith("band")
        }

    def read_keys(self) -> Documents:
        """Read the columns in ``KEYS`` (key, hash for holding out, length) in one request."""
        _, _, end = self.layout.find("sketch")
        data = self._bytes(0, end)
        return {name: _view(data, *self.layout.find(name)) for name, _ in KEYS}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Read rows [begin, end) of a column in one request. For ``tokens``, the range counts tokens; for ``names``, bytes. If
        ``end`` is None, read to the end of the column."""
        kind, shape, place = self.layout.find(name)
        end = shape[0] if end is None else end
        width = kind.itemsize * int(np.prod(shape[1:]))
        return _view(self._bytes(place + begin * width, place + end * width), kind, (end - begin, *shape[1:]), 0)

    def name_of(self, row: int) -> str:
        """Return the name of the document at index ``row``."""
        ends = [0, *self.read("name_ends", max(0, row - 1), row + 1).tolist()][-2:]
        return bytes(self.read("names", *ends)).decode()

    def write(self, documents: Mapping[str, np.ndarray]) -> None:
        """Write the columns one after another. They are not joined in memory, which would take their size again."""
        given = {**documents}
        if self.layout.has_bands:
            given |= {f"band{number}": documents["signature"][:, number] for number in range(BANDS)}
        parts: list[memoryview] = []
        for name, kind, shape, _ in self.layout.columns():
            if name:
                assert given[name].shape == shape, (name, given[name].shape, shape)
                parts.append(np.ascontiguousarray(given[name], kind).reshape(-1).view(np.uint8).data)
        self.work.put(self.name, parts)

    def _bytes(self, begin: int, end: int) -> bytes | memoryview:
        found = self.work.read_range(self.name, begin, end) if begin < end else b""
        if len(found) != end - begin:
            problem = f"ends {end - begin - len(found)} bytes too early; remove it, and run the same command again"
            raise damaged(self.work.where(self.name), problem)
        return found


def sizes(documents: Mapping[str, np.ndarray]) -> Sizes:
    """Count the documents, tokens and name bytes in ``documents``."""
    return Sizes(len(documents["length"]), len(documents["tokens"]), len(documents["names"]))


def in_order(parts: Sequence[Documents], heldout_fraction: float) -> Documents:
    """Merge the documents of several files. First come the documents that may be held out, then all others; both groups are
    sorted by key, a hash of the text. Documents with equal keys stay in the order of ``parts``."""
    low, high, share = (np.concatenate([part[name] for part in parts]) for name in ("low", "high", "share"))
    order = np.lexsort((low, high, share / 2.0**64 >= heldout_fraction))
    found = {name: np.concatenate([part[name] for part in parts])[order] for name in ("high", "low", "share", "length")}
    for name in ("sketch", "signature"):
        found[name] = np.concatenate([part[name] for part in parts])[order]
    tokens, names = [], []
    for part in parts:
        tokens += _pieces(part["tokens"], np.cumsum(part["length"], dtype=np.int64))
        names += _pieces(part["names"], part["name_ends"])
    chosen = [names[place] for place in order.tolist()]
    found["tokens"] = np.concatenate([tokens[place] for place in order.tolist()] or [parts[0]["tokens"]])
    found["names"] = np.concatenate(chosen or [np.empty(0, np.uint8)])
    found["name_ends"] = np.cumsum([len(one) for one in chosen], dtype=np.int64)
    return found


def _pieces(values: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    return [values[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]


def _view(data: bytes | memoryview, kind: np.dtype, shape: tuple[int, ...], place: int) -> np.ndarray:
    count = int(np.prod(shape))
    found: Any = np.frombuffer(data, kind, count, place) if count else np.empty(0, kind)
    return np.asarray(found).reshape(shape)
