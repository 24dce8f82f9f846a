"""Write a checkpoint that holds weights only, in one process. A function of the caller returns the weights, one box (part of a
tensor) at a time.

    for each part (whole rows of tensors, 128 MiB): read the rows, write a data file
    then: the manifest and COMMITTED

Memory use depends on the size of a part, not on the size of the model.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Manifest, Meta, StagedPiece, read_manifest
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import Box
from springtide.checkpoint.validate import ITEM_BYTES
from springtide.storage import Folder

PART_BYTES = 128 * 2**20
"""Largest size of a part: the tensor rows that are read and written at a time. Memory use is a few times as large."""
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> its type and shape."""


def write_weights(
    to: Folder,
    meta: Meta,
    config: Mapping[str, Any],
    tensors: Kinds,
    read: Callable[[StagedPiece], Tensor],
    part_bytes: int = PART_BYTES,
    lease: leases.Lease | None = None,
) -> Manifest:
    """Write ``tensors`` as a checkpoint of the run ``to`` and return its manifest. If ``read`` raises, nothing is committed.

    ``read`` returns the bytes of a box, uint8 (bytes,). Each part is written as if it were one rank's part, so
    ``meta.world_size`` is set to the number of parts. ``lease``: the caller's lease (right to write ``to``); None: this
    function claims a lease and ends it.
    """
    parts = list(_parts(tensors, part_bytes))
    meta = meta.model_copy(update={"world_size": len(parts)})
    held = lease or leases.claim(to, secrets.token_hex(8))
    writer = PieceWriter(to)
    try:
        for rank, pieces in reversed(list(enumerate(parts))):  # rank 0 last: it commits once all other parts exist
            bytes_of = {one.tensor: read(one).numpy().data for one in pieces}
            view = functools.partial(_view, bytes_of)
            job = CommitJob(to.url, held.term, rank, meta, dict(config), pieces, Rule(1), held.owner)
            writer.write(job, view, lambda: False)
            del bytes_of, view
    finally:
        if not lease:
            leases.end(to, held.term)
    return read_manifest(to, job.name)


def boxes(shape: tuple[int, ...], row_bytes: int, most_bytes: int) -> Iterator[Box]:
    """Yield the boxes of whole rows that make up a tensor. Each has at most ``most_bytes``, but at least one row."""
    if not shape:
        yield Box((), ())
        return
    at_once = max(1, most_bytes // max(1, row_bytes))
    for begin in range(0, max(shape[0], 1), at_once):
        count = min(at_once, shape[0] - begin)
        yield Box((begin, *(0 for _ in shape[1:])), (count, *shape[1:]))


def _view(bytes_of: dict[str, memoryview], one: StagedPiece) -> memoryview:
    return bytes_of[one.tensor]


def _parts(tensors: Kinds, part_bytes: int) -> Iterator[list[StagedPiece]]:
    """Yield parts of at most ``part_bytes`` (or one row). A part is a list of boxes of whole rows, at most one per tensor."""
    part: list[StagedPiece] = []
    size = 0
    for name, (dtype, shape) in tensors.items():
        row = ITEM_BYTES[dtype] * math.prod(shape[1:])
        for box in boxes(shape, row, part_bytes):
            size_bytes = ITEM_BYTES[dtype] * box.num_elements
            if part and (size + size_bytes > part_bytes or any(box.offsets)):
                yield part
                part, size = [], 0
            part.append(StagedPiece(name, dtype, shape, *box, size, size_bytes))
            size += size_bytes
    yield part
