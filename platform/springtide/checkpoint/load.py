"""Read a checkpoint back at any world size.

    boxes this rank wants x pieces that are stored -> blocks to read -> read, verified, copied, all in one pass

Bytes are verified as they arrive; nothing is read twice, and nothing is buffered but bytes on their way into a tensor.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from springtide.checkpoint.adapters import without_adapter
from springtide.checkpoint.averages import as_weights, begin_averages, match_averages
from springtide.checkpoint.format import BLOCK_BYTES, BadFile, Manifest, Piece, checkpoints, read_index, read_manifest
from springtide.checkpoint.new_blocks import with_new_blocks, without_new_outputs
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.tensors import Box, box, local, materialize, named_tensors, raw, type_name, type_of
from springtide.errors import CheckpointError
from springtide.storage import Folder, digest

_READ_BYTES = 16 * 2**20
_READERS = 6
_NAMES_SHOWN = 5
_CONVERTED_BYTES = 64 * 2**20
"""Most bytes that are converted to another type at a time, unless one row is larger."""
Convert = Callable[[Tensor, torch.dtype], Tensor]
"""Makes rows of a tensor as a model holds them from rows as they are stored: in another type, or packed, if that is uint8."""

_log = logging.getLogger(__name__)


class PieceSource(Protocol):
    """A source of the files that pieces name."""

    def stream(self, name: str, begin: int, end: int) -> Iterable[memoryview]: ...

    def size(self, name: str) -> int: ...


def load(
    run: Folder,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    manifest: Manifest | None = None,
    averaged: bool = False,
    new_adapter: bool = False,
    convert: Convert | None = None,
    new_blocks: Sequence[int] = (),
    table: PieceTable | None = None,
) -> Manifest:
    """Load this rank's part of checkpoint ``name`` in place, at any world size and layout. Returns its manifest. ``averaged``:
    load the averaged weights into ``model``, without an optimizer. ``new_adapter``: leave the model's adapter as it is.
    ``convert``: how tensors that are stored in a wider type than the model's become those of the model; None: not at all.
    ``new_blocks``: as ``train.new_blocks``; without an optimizer. ``table``: the checkpoint's pieces, if they were read.

    Raises CheckpointError with the bad file, or with the tensors that are missing, unexpected or of another shape. A
    single process needs no process group.
    """
    manifest = manifest or read_manifest(run, name)
    pieces = read_pieces(run, name, manifest) if table is None else []
    if optimizer is not None:
        materialize(optimizer)
    wanted = named_tensors(model, optimizer)
    if table is not None:  # only a state as it was saved is read by the names that it has here
        is_whole = optimizer is not None and not (new_adapter or new_blocks or averaged or convert)
        pieces = table.overlapping({key: box(one) for key, one in wanted.items()}) if is_whole else table.pieces()
    if new_adapter:
        wanted = without_adapter(wanted)
    if new_blocks:
        pieces, wanted = with_new_blocks(pieces, new_blocks), without_new_outputs(wanted, new_blocks)
    if optimizer is None:
        pieces = as_weights(pieces) if averaged else [piece for piece in pieces if piece.tensor.startswith("model/")]
    if convert is not None:
        wider = wider_tensors(pieces, wanted, convert)
        for name, found in wider.items():
            _read_converted(checkpoints(run), found, wanted[name], convert)
        pieces, wanted = without(wider, pieces, wanted)
    read_state(checkpoints(run), pieces, wanted)
    return manifest


def wider_tensors(pieces: Iterable[Piece], wanted: Mapping[str, Tensor], convert: Convert) -> dict[str, list[Piece]]:
    """Return the pieces of the tensors that are stored as floating-point numbers of another type than ``wanted``, and become
    these by ``convert``."""
    found = {}
    for name, some in by_tensor(pieces).items():
        stored, tensor = type_of(some[0].dtype), wanted.get(name)
        if (
            tensor is None
            or not stored.is_floating_point
            or stored == tensor.dtype
            or len(some[0].shape) != tensor.dim()
        ):
            continue
        one_row = convert(torch.zeros(1, *some[0].shape[1:], dtype=stored), tensor.dtype)
        if (one_row.dtype, some[0].shape[0], one_row.shape[1:]) == (tensor.dtype, tensor.shape[0], tensor.shape[1:]):
            found[name] = some
    return found


def without(
    names: Collection[str], pieces: Iterable[Piece], wanted: Mapping[str, Tensor]
) -> tuple[list[Piece], dict[str, Tensor]]:
    """Return all pieces and tensors but those of ``names``."""
    left = {name: tensor for name, tensor in wanted.items() if name not in names}
    return [piece for piece in pieces if piece.tensor not in names], left


@torch.no_grad()
def _read_converted(source: PieceSource, pieces: Sequence[Piece], tensor: Tensor, convert: Convert) -> None:
    """Fill this rank's rows of ``tensor``, some at a time: what is stored may not fit into memory."""
    shape, stored = pieces[0].shape, type_of(pieces[0].dtype)
    first, target = box(tensor).offsets[0], local(tensor)
    at_once = max(1, _CONVERTED_BYTES // (stored.itemsize * math.prod(shape[1:])))
    for begin in range(0, len(target), at_once):
        rows = torch.empty(min(at_once, len(target) - begin), *shape[1:], dtype=stored)
        held = Box((first + begin, *(0 for _ in shape[1:])), tuple(rows.shape))
        read_boxes(source, pieces, rows, held)
        target[begin : begin + len(rows)].copy_(convert(rows, target.dtype))


def read_pieces(run: Folder, name: str, manifest: Manifest, indexes: Sequence[str] | None = None) -> list[Piece]:
    """Return the pieces of all tensors of a checkpoint, from its indexes, several read at a time; or those in some of its
    ``indexes``. Raises as ``read_index``."""
    folder, indexes = checkpoints(run) / name, manifest.indexes if indexes is None else indexes
    with ThreadPoolExecutor(_READERS, "springtide-load") as threads:
        found = threads.map(lambda file: read_index(folder, file, manifest.files[file]["digest"]), indexes)
        return list(itertools.chain.from_iterable(pieces for _, pieces in found))


def by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Return the pieces of each tensor."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).append(piece)
    return found


@torch.no_grad()
def read_state(source: PieceSource, pieces: Sequence[Piece], wanted: Mapping[str, Tensor]) -> None:
    """Fill ``wanted``, the tensors of a model and its optimizer, as ``read_into``; averaged weights that are not stored begin
    with the weights, and those that are not wanted are ignored."""
    pieces, stored, begun = match_averages(pieces, wanted)
    read_into(source, pieces, stored)
    begin_averages(begun, wanted)


class Mismatch(CheckpointError):
    """A good checkpoint of another model."""


def read_into(source: PieceSource, pieces: Sequence[Piece], wanted: Mapping[str, Tensor], verify: bool = True) -> None:
    """Fill each tensor's local part from the pieces that overlap it, several reads at a time."""
    found = by_tensor(pieces)
    check_names(found, wanted)
    copies = [copy for name, one in wanted.items() for copy in _copies(found[name], one, box(one))]
    _read_all(source, copies, verify)


def read_boxes(source: PieceSource, pieces: Sequence[Piece], tensor: Tensor, held: Box) -> None:
    """Fill ``tensor``, which is not distributed, with the box ``held`` of the tensor that ``pieces`` are of."""
    _read_all(source, _copies(pieces, tensor, held), verify=True)


def _copies(pieces: Sequence[Piece], tensor: Tensor, held: Box) -> list[_Copy]:
    """Return the overlaps of ``pieces`` with a box. Raises CheckpointError if they do not fill it, each element once."""
    found = [copy for piece in pieces if (copy := _Copy.of(piece, tensor, held))]
    name = pieces[0].tensor
    check_disjoint(name, [copy.piece for copy in found])
    lacking = held.num_elements - sum(copy.num_elements for copy in found)
    if lacking:
        raise CheckpointError(f"{name}: {lacking} elements are in no file of the checkpoint")
    return found


def _read_all(source: PieceSource, copies: Sequence[_Copy], verify: bool) -> None:
    """Read what overlaps, several reads at a time."""
    reads = _reads(copies)
    if len(reads) == 1:  # threads would only wait for each other
        _read(source, reads[0], verify)
    else:
        with ThreadPoolExecutor(_READERS, "springtide-load") as threads:
            for _ in threads.map(lambda read: _read(source, read, verify), reads):
                pass
    for copy in copies:
        copy.finish()


def check_disjoint(tensor: str, pieces: Sequence[Piece]) -> None:
    """Raise CheckpointError if pieces of a tensor overlap: the rest of it would be in none, though their sizes add up."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for number, piece in enumerate(ordered):
        for other in itertools.islice(ordered, number + 1, None):
            if piece.offsets and other.offsets[0] >= piece.offsets[0] + piece.sizes[0]:
                break  # nor do the next ones, which begin even later
            sides = zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            if all(begin < start + length and start < begin + size for begin, size, start, length in sides):
                raise CheckpointError(f"{tensor}: its pieces in {piece.file} and {other.file} overlap")


def check_names(stored: Mapping[str, Sequence[Piece]], wanted: Mapping[str, Tensor]) -> None:
    """Raise Mismatch with the tensors that the checkpoint lacks, that the model lacks, or that differ in shape or type;
    CheckpointError if the pieces of one do."""
    problems = []
    for what, names in (
        ("the checkpoint lacks", wanted.keys() - stored.keys()),
        ("the model has no place for", stored.keys() - wanted.keys()),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
            problems.append(
                f"{what} {shown}" + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
            )
    for name in sorted(wanted.keys() & stored.keys()):
        piece, tensor = stored[name][0], wanted[name]
        for other in stored[name]:
            if (other.dtype, other.shape) != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"{name}: its pieces differ: {piece.dtype} {piece.shape} in {piece.file}, {other.dtype} {other.shape} in "
                    f"{other.file}"
                )
        here = type_name(tensor.dtype), tuple(tensor.shape)
        if (piece.dtype, piece.shape) != here:
            problems.append(f"{name} is {piece.dtype} {piece.shape} there and {here[0]} {here[1]} here")
    if problems:
        raise Mismatch(
            "the checkpoint is of another model: "
            + "; ".join(problems[:_NAMES_SHOWN])
            + ". Use the config it was saved with"
        )


class _Copy:
    """The overlap of a stored piece and this rank's part of the tensor."""

    def __init__(self, piece: Piece, overlap: Box, tensor: Tensor, held: Box) -> None:
        self.piece = piece
        self.num_elements = overlap.num_elements
        self._target = local(tensor)
        within_piece = [begin - offset for begin, offset in zip(overlap.offsets, piece.offsets, strict=True)]
        within_held = [begin - offset for begin, offset in zip(overlap.offsets, held.offsets, strict=True)]
        self._place = tuple(slice(begin, begin + size) for begin, size in zip(within_held, overlap.sizes, strict=True))
        self._source = tuple(
            slice(begin, begin + size) for begin, size in zip(within_piece, overlap.sizes, strict=True)
        )
        item = self._target.element_size()
        row = item * math.prod(piece.sizes[1:])
        # whole rows of the piece are read: sharding along the first dimension needs nothing else
        first, rows = (within_piece[0], overlap.sizes[0]) if overlap.sizes else (0, 1)
        self.begin, self.end = first * row, (first + rows) * row
        same_rows = piece.sizes[1:] == held.sizes[1:] == overlap.sizes[1:]
        self._whole: Tensor | None = None
        if same_rows and self._target.is_contiguous():
            offset = within_held[0] * row if overlap.sizes else 0
            into = raw(self._target)[offset : offset + self.end - self.begin]
        else:  # only some columns: the rows are gathered first
            self._whole = torch.empty((rows, *piece.sizes[1:]), dtype=self._target.dtype)
            into = raw(self._whole)
        self._into: Any = into.numpy() if into.is_cpu else into

    @classmethod
    def of(cls, piece: Piece, tensor: Tensor, held: Box) -> _Copy | None:
        """Return the copy; None if the piece and the held box do not overlap."""
        begins = tuple(map(max, piece.offsets, held.offsets))
        ends = [
            min(one + size, other + length)
            for one, size, other, length in zip(piece.offsets, piece.sizes, held.offsets, held.sizes, strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        return cls(piece, Box(begins, sizes), tensor, held)

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks to read."""
        piece = self.piece
        for number in range(self.begin // BLOCK_BYTES, -(-self.end // BLOCK_BYTES)):
            begin = number * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, piece.size_bytes)
            yield _Block(piece.file, piece.begin + begin, piece.begin + end, number, self)

    def take(self, data: memoryview, begin: int) -> None:
        """Take bytes of the piece, from offset ``begin``; copy those that this rank wants."""
        first, last = max(begin, self.begin), min(begin + data.nbytes, self.end)
        if first >= last:
            return
        part = np.frombuffer(data[first - begin : last - begin], dtype=np.uint8)
        target = self._into[first - self.begin : last - self.begin]
        if isinstance(target, np.ndarray):
            np.copyto(target, part)
        else:
            target.copy_(torch.from_numpy(part.copy()))  # torch needs writable memory

    def finish(self) -> None:
        """Copy the columns, if rows were gathered."""
        if self._whole is not None:
            first_row = (slice(0, self._source[0].stop - self._source[0].start), *self._source[1:])
            self._target[self._place].copy_(self._whole[first_row])


class _Block(NamedTuple):
    """A block of a piece, and the copy that needs it."""

    file: str
    begin: int
    end: int
    """Offset in the file, as ``begin`` [bytes]."""
    number: int
    copy: _Copy

    @property
    def what(self) -> str:
        """Description for error messages."""
        return f"{self.file}: bytes {self.begin} to {self.end} of {self.copy.piece.tensor}"


def _reads(copies: Sequence[_Copy]) -> list[list[_Block]]:
    """Return the blocks to read, grouped into reads: blocks that are contiguous in a file, up to about _READ_BYTES."""
    blocks = sorted((block for copy in copies for block in copy.blocks()), key=lambda block: block[:3])
    reads: list[list[_Block]] = []
    for block in blocks:
        read = reads[-1] if reads else []
        follows = read and (read[-1].file, read[-1].end) == (block.file, block.begin)
        if follows and block.begin - read[0].begin < _READ_BYTES:
            read.append(block)
        else:
            reads.append([block])
    return reads


def _read(source: PieceSource, blocks: list[_Block], verify: bool) -> None:
    """Read contiguous blocks; each byte is hashed and copied while it is in the CPU cache."""
    file, place, end = blocks[0].file, blocks[0].begin, blocks[-1].end
    running, left = digest.Running(), iter(blocks)
    block = next(left)
    try:
        for data in source.stream(file, place, end):
            while data.nbytes:
                part, data = data[: block.end - place], data[block.end - place :]
                block.copy.take(part, block.number * BLOCK_BYTES + place - block.begin)
                place += part.nbytes
                if verify:
                    running.add(part)
                    if place == block.end and (found := running.end()) != block.copy.piece.digests[block.number]:
                        expected = block.copy.piece.digests[block.number]
                        raise BadFile(f"{block.what}: digest expected {expected}, found {found}", file)
                block = next(left, block) if place == block.end else block
    except (FileNotFoundError, IsADirectoryError):
        raise BadFile(f"{file} is missing", file) from None
    except OSError:
        if source.size(file) >= end:
            raise  # the file is complete: a network error
    if place != end:
        raise BadFile(f"{file} ends after {source.size(file)} bytes, {end} were committed", file)
