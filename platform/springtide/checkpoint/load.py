"""Read a checkpoint back at any world size.

    the tensor parts that this rank holds, and the stored tensor parts (pieces) that overlap them
      -> the blocks of 4 MiB to read -> read, verify and copy each block, in one pass

Bytes are verified as they arrive. No byte is read twice, and only bytes on their way into a tensor are buffered.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from springtide.checkpoint.adapters import without_adapter
from springtide.checkpoint.averages import as_weights, begin_averages, match_averages
from springtide.checkpoint.format import Manifest, Piece, checkpoints, read_index, read_manifest
from springtide.checkpoint.new_blocks import with_new_blocks, without_new_outputs
from springtide.checkpoint.piece_table import PieceTable
from springtide.checkpoint.tensors import Box, box, local, materialize, named_tensors, raw, type_name, type_of
from springtide.checkpoint.verified_reads import PieceSource, blocks_of, read_all
from springtide.errors import CheckpointError
from springtide.storage import Folder

_READERS = 6
_NAMES_SHOWN = 5
_CONVERTED_BYTES = 64 * 2**20
"""Largest number of stored bytes that are converted to another type at a time. A single larger row is converted as a whole."""
Convert = Callable[[Tensor, torch.dtype], Tensor]
"""Function: (stored rows of a tensor, type of the model's tensor) -> the rows in the model's type. If the model's type is
uint8, the model stores packed 4-bit weights."""

_log = logging.getLogger(__name__)


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
    """Load this rank's part of checkpoint ``name`` in place, at any world size and layout. Returns the manifest.

    A single process needs no process group.

    Args:
        run: the run that the checkpoint belongs to.
        name: name of the checkpoint.
        model: filled with the checkpoint's weights.
        optimizer: filled with the checkpoint's optimizer state; None loads weights only.
        manifest: the checkpoint's manifest, if it was read already.
        averaged: load the averaged weights into ``model``; needs ``optimizer`` None.
        new_adapter: do not load the model's low-rank adapter, but leave it as it is.
        convert: converts stored floating-point tensors whose type differs from the model's; None: such tensors are an error.
        new_blocks: numbers of blocks that the model has and the checkpoint lacks (``train.new_blocks``); needs ``optimizer``
            None.
        table: the checkpoint's pieces (stored tensor parts), if they were read already.

    Raises:
        CheckpointError: a file is bad, or tensors are missing, unexpected or of another shape. The message names them.
    """
    manifest = manifest or read_manifest(run, name)
    pieces = read_pieces(run, name, manifest) if table is None else []
    if optimizer is not None:
        materialize(optimizer)
    wanted = named_tensors(model, optimizer)
    if table is not None:  # select this rank's pieces by tensor name, unless the options below rename or drop tensors
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
    """Return the tensors that ``convert`` must convert to the model's type: name -> pieces (stored tensor parts). Such a tensor
    is stored as floating-point numbers, but has another type in ``wanted``, and ``convert`` turns it into the type and shape in
    ``wanted``."""
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
    """Return ``pieces`` (stored tensor parts) and ``wanted`` (tensors to fill) without the tensors ``names``."""
    left = {name: tensor for name, tensor in wanted.items() if name not in names}
    return [piece for piece in pieces if piece.tensor not in names], left


@torch.no_grad()
def _read_converted(source: PieceSource, pieces: Sequence[Piece], tensor: Tensor, convert: Convert) -> None:
    """Fill this rank's rows of ``tensor`` with converted rows, a few at a time, because the rows in the stored type may not fit
    into memory."""
    shape, stored = pieces[0].shape, type_of(pieces[0].dtype)
    first, target = box(tensor).offsets[0], local(tensor)
    at_once = max(1, _CONVERTED_BYTES // (stored.itemsize * math.prod(shape[1:])))
    for begin in range(0, len(target), at_once):
        rows = torch.empty(min(at_once, len(target) - begin), *shape[1:], dtype=stored)
        held = Box((first + begin, *(0 for _ in shape[1:])), tuple(rows.shape))
        read_boxes(source, pieces, rows, held)
        target[begin : begin + len(rows)].copy_(convert(rows, target.dtype))


def read_pieces(run: Folder, name: str, manifest: Manifest, indexes: Sequence[str] | None = None) -> list[Piece]:
    """Return the pieces (stored tensor parts) that a checkpoint's ``indexes`` list; by default all of its pieces. Reads several
    indexes at a time. Raises the errors of ``read_index``."""
    folder, indexes = checkpoints(run) / name, manifest.indexes if indexes is None else indexes
    with ThreadPoolExecutor(_READERS, "springtide-load") as threads:
        found = threads.map(lambda file: read_index(folder, file, manifest.files[file]["digest"]), indexes)
        return list(itertools.chain.from_iterable(pieces for _, pieces in found))


def by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Return ``pieces`` (stored tensor parts) grouped by the name of their tensor."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).append(piece)
    return found


@torch.no_grad()
def read_state(source: PieceSource, pieces: Sequence[Piece], wanted: Mapping[str, Tensor]) -> None:
    """Fill ``wanted``, the tensors of a model and its optimizer, from ``pieces`` (stored tensor parts). If only the run keeps
    moving averages of weights, they start as copies of the loaded weights. If only the checkpoint has averages, they are
    ignored."""
    pieces, stored, begun = match_averages(pieces, wanted)
    read_into(source, pieces, stored)
    begin_averages(begun, wanted)


class Mismatch(CheckpointError):
    """The checkpoint is intact, but does not fit this run: another model or data order."""


def read_into(source: PieceSource, pieces: Sequence[Piece], wanted: Mapping[str, Tensor], verify: bool = True) -> None:
    """Fill this rank's part of each tensor in ``wanted`` from the stored pieces that overlap this part, several reads at a
    time."""
    found = by_tensor(pieces)
    check_names(found, wanted)
    copies = [copy for name, one in wanted.items() for copy in _copies(found[name], one, box(one))]
    _read_all(source, copies, verify)


def read_boxes(source: PieceSource, pieces: Sequence[Piece], tensor: Tensor, held: Box) -> None:
    """Fill ``tensor``, which is not distributed, with a part of a stored tensor. ``pieces``: all stored parts of that tensor;
    ``held``: offsets and sizes of the part to read."""
    _read_all(source, _copies(pieces, tensor, held), verify=True)


def _copies(pieces: Sequence[Piece], tensor: Tensor, held: Box) -> list[_Copy]:
    """Return the copy operations that fill ``tensor`` from ``pieces`` (stored tensor parts). ``held``: offsets and sizes of
    ``tensor`` in the whole tensor. Raises CheckpointError unless the pieces cover each of its elements exactly once."""
    found = [copy for piece in pieces if (copy := _Copy.of(piece, tensor, held))]
    name = pieces[0].tensor
    check_disjoint(name, [copy.piece for copy in found])
    lacking = held.num_elements - sum(copy.num_elements for copy in found)
    if lacking:
        raise CheckpointError(f"{name}: {lacking} elements are in no file of the checkpoint")
    return found


def _read_all(source: PieceSource, copies: Sequence[_Copy], verify: bool) -> None:
    """Perform ``copies``: read the bytes of stored pieces into tensors, several reads at a time."""
    blocks = (block for one in copies for block in blocks_of(one.piece, one.begin, one.end, one.take))
    read_all(source, blocks, _READERS, verify)
    for copy in copies:
        copy.finish()


def check_disjoint(tensor: str, pieces: Sequence[Piece]) -> None:
    """Raise CheckpointError if stored pieces of a tensor overlap. Their sizes could then add up to the size of the tensor
    although elements are missing."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for number, piece in enumerate(ordered):
        for other in itertools.islice(ordered, number + 1, None):
            if piece.offsets and other.offsets[0] >= piece.offsets[0] + piece.sizes[0]:
                break  # pieces after ``other`` begin even later, so they do not overlap ``piece`` either
            sides = zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            if all(begin < start + length and start < begin + size for begin, size, start, length in sides):
                raise CheckpointError(f"{tensor}: its pieces in {piece.file} and {other.file} overlap")


def check_names(stored: Mapping[str, Sequence[Piece]], wanted: Mapping[str, Tensor]) -> None:
    """Raise Mismatch if tensors are missing in the checkpoint or in the model, or differ in shape or type. Raise
    CheckpointError if the pieces of one tensor differ in shape or type."""
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
    """A copy operation, from a stored piece to this rank's ``tensor``. ``tensor`` is the box (index range) ``held`` of a whole
    tensor. The operation fills the part of ``tensor`` that the piece overlaps."""

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
        # read whole rows of the piece: with sharding along the first dimension, no unneeded byte is read
        first, rows = (within_piece[0], overlap.sizes[0]) if overlap.sizes else (0, 1)
        self.begin, self.end = first * row, (first + rows) * row
        same_rows = piece.sizes[1:] == held.sizes[1:] == overlap.sizes[1:]
        self._whole: Tensor | None = None
        if same_rows and self._target.is_contiguous():
            offset = within_held[0] * row if overlap.sizes else 0
            into = raw(self._target)[offset : offset + self.end - self.begin]
        else:  # read whole rows into a buffer; ``finish`` copies the wanted columns to the tensor
            self._whole = torch.empty((rows, *piece.sizes[1:]), dtype=self._target.dtype)
            into = raw(self._whole)
        self._into: Any = into.numpy() if into.is_cpu else into

    @classmethod
    def of(cls, piece: Piece, tensor: Tensor, held: Box) -> _Copy | None:
        """Return the copy operation for the overlap of a stored ``piece`` and the box ``held``; None if they do not overlap."""
        begins = tuple(map(max, piece.offsets, held.offsets))
        ends = [
            min(one + size, other + length)
            for one, size, other, length in zip(piece.offsets, piece.sizes, held.offsets, held.sizes, strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        return cls(piece, Box(begins, sizes), tensor, held)

    def take(self, data: memoryview, begin: int) -> None:
        """Copy to the tensor those bytes of ``data`` that it needs. ``begin``: offset of ``data`` in the stored piece."""
        first, last = max(begin, self.begin), min(begin + data.nbytes, self.end)
        if first >= last:
            return
        part = np.frombuffer(data[first - begin : last - begin], dtype=np.uint8)
        target = self._into[first - self.begin : last - self.begin]
        if isinstance(target, np.ndarray):
            np.copyto(target, part)
        else:
            target.copy_(torch.from_numpy(part.copy()))  # copied because ``from_numpy`` needs writable memory

    def finish(self) -> None:
        """Copy the wanted columns from the row buffer, if there is one, to the tensor."""
        if self._whole is not None:
            first_row = (slice(0, self._source[0].stop - self._source[0].start), *self._source[1:])
            self._target[self._place].copy_(self._whole[first_row])
