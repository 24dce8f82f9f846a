"""Pieces of a checkpoint (stored tensor parts) as a table of NumPy columns.

    each rank reads some of the indexes (lists of pieces) -> a table of these pieces -> all ranks exchange their tables
      -> each rank selects the pieces that overlap the tensor parts that it holds

A checkpoint of 1,024 ranks has millions of pieces, and a rank needs some thousands of them. A table takes a tenth of the memory
of one object per piece, and the selection needs no loop over all pieces. This module does not import torch, because snapshot
servers, which run without torch, send tables too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np

from springtide.checkpoint.format import BLOCK_BYTES, Piece
from springtide.storage import digest, to_json

if TYPE_CHECKING:  # not at run time: checkpoint.tensors imports torch
    from springtide.checkpoint.tensors import Box

_DIGEST_BYTES = 16
_T = TypeVar("_T")


class PieceTable(NamedTuple):
    """A table of pieces of a checkpoint, one row per piece. n: number of pieces.

    >>> piece = Piece("w", "U8", (8,), (4,), (4,), "step-0000000001/a0001-r0000.safetensors", 64, 4, ("0" * 32,))
    >>> PieceTable.of([piece]).pieces() == [piece]
    True
    """

    tensors: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape of each tensor."""
    files: list[str]
    tensor: np.ndarray
    """int32 (n,): index in ``tensors`` of the tensor that the piece belongs to."""
    file: np.ndarray
    """int32 (n,): index in ``files`` of the file that holds the piece."""
    bytes_at: np.ndarray
    """int64 (n, 2): offset of the piece in its file, and size of the piece [bytes]."""
    boxes: np.ndarray
    """int64 (sum of 2 * dimensions over all pieces,): for each piece its offsets, then its sizes, one number per dimension."""
    digests: np.ndarray
    """uint8 (number of blocks, 16): the digests of the blocks of all pieces, one piece after the other."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Self:
        """Return the table with one row for each of ``pieces`` (stored tensor parts)."""
        tensors: dict[tuple[str, str, tuple[int, ...]], int] = {}
        files: dict[str, int] = {}
        of_tensor = [tensors.setdefault(piece[:3], len(tensors)) for piece in pieces]
        in_file = [files.setdefault(piece.file, len(files)) for piece in pieces]
        boxes = [number for piece in pieces for number in (*piece.offsets, *piece.sizes)]
        digests = bytes.fromhex("".join(one for piece in pieces for one in piece.digests))
        return cls(
            list(tensors),
            list(files),
            np.array(of_tensor, np.int32),
            np.array(in_file, np.int32),
            np.array([(piece.begin, piece.size_bytes) for piece in pieces], np.int64).reshape(-1, 2),
            np.array(boxes, np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST_BYTES),
        )

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """Return one table with the rows of all ``tables``, in order."""
        tensors: dict[tuple[str, str, tuple[int, ...]], int] = {}
        files: dict[str, int] = {}
        of_tensor, in_file = [], []
        for table in tables:
            of_tensor.append(np.array([tensors.setdefault(one, len(tensors)) for one in table.tensors], np.int32))
            in_file.append(np.array([files.setdefault(one, len(files)) for one in table.files], np.int32))
        return cls(
            list(tensors),
            list(files),
            np.concatenate([ids[one.tensor] for ids, one in zip(of_tensor, tables, strict=True)]),
            np.concatenate([ids[one.file] for ids, one in zip(in_file, tables, strict=True)]),
            np.concatenate([one.bytes_at for one in tables]),
            np.concatenate([one.boxes for one in tables]),
            np.concatenate([one.digests for one in tables]),
        )

    def pieces(self) -> list[Piece]:
        """Return all rows of the table as pieces."""
        return self._rows(np.arange(len(self.tensor)), *self._dims_and_begins())

    @property
    def digest(self) -> str:
        """The digest of the whole table.

        >>> PieceTable.of([]).digest == PieceTable.joined([PieceTable.of([]), PieceTable.of([])]).digest
        True
        """
        running = digest.Running()
        running.add(to_json([*self[:2], [len(column) for column in self[2:]]]).encode())
        for column in self[2:]:
            running.add(column.tobytes())
        return running.end()

    def overlapping(self, wanted: Mapping[str, Box]) -> list[Piece]:
        """Return the pieces whose rows (first dimension) overlap the box of their tensor in ``wanted``.

        Always includes one piece of every tensor, wanted or not, because the caller compares names and shapes of all tensors.
        """
        dims, begins = self._dims_and_begins()
        ends_before, begins_after = np.zeros((2, len(self.tensors)), np.int64)
        for number, (name, _, shape) in enumerate(self.tensors):
            if (box := wanted.get(name)) is not None and (not shape or len(box.offsets) != len(shape)):
                begins_after[number] = np.iinfo(np.int64).max  # no rows to compare: keep all pieces
            elif box is not None:
                ends_before[number], begins_after[number] = box.offsets[0], box.offsets[0] + box.sizes[0]
        has_rows = dims > 0
        first, length = np.zeros_like(begins), np.ones_like(begins)
        first[has_rows] = self.boxes[begins[has_rows]]
        length[has_rows] = self.boxes[(begins + dims)[has_rows]]
        kept = (first < begins_after[self.tensor]) & (first + length > ends_before[self.tensor])
        kept[np.unique(self.tensor, return_index=True)[1]] = True
        return self._rows(np.flatnonzero(kept), dims, begins)

    def _dims_and_begins(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of dimensions of each piece, and the index in ``boxes`` of its first offset."""
        dims = np.array([len(shape) for _, _, shape in self.tensors], np.int64)[self.tensor]
        return dims, np.cumsum(2 * dims) - 2 * dims

    def _rows(self, rows: np.ndarray, dims: np.ndarray, begins: np.ndarray) -> list[Piece]:
        """Return the pieces in the table rows with the numbers ``rows``. ``dims`` and ``begins``: from ``_dims_and_begins``,
        for all pieces."""
        blocks = np.maximum(1, -(-self.bytes_at[:, 1] // BLOCK_BYTES))
        first_block = np.cumsum(blocks) - blocks
        columns = (self.tensor, self.file, self.bytes_at[:, 0], self.bytes_at[:, 1], dims, begins, first_block, blocks)
        found = []
        for tensor, file, begin, size, length, at, block, count in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            box = self.boxes[at : at + 2 * length].tolist()
            digests = self.digests[block : block + count].tobytes().hex()
            cut = (digests[place : place + 2 * _DIGEST_BYTES] for place in range(0, len(digests), 2 * _DIGEST_BYTES))
            name, dtype, shape = self.tensors[tensor]
            found.append(
                Piece(
                    name,
                    dtype,
                    shape,
                    tuple(box[:length]),
                    tuple(box[length:]),
                    self.files[file],
                    begin,
                    size,
                    tuple(cut),
                )
            )
        return found


def share(items: Sequence[_T], rank: int, size: int) -> list[_T]:
    """Return the ``items`` (indexes of a checkpoint, or parts of a snapshot) that rank ``rank`` of ``size`` ranks reads.

    >>> share(["a", "b", "c"], rank=1, size=2)
    ['b']
    """
    return list(itertools.islice(items, rank, None, size))
