"""Commit a snapshot from the memory of nodes to the store, while no worker group trains. This module does not import torch.

all parts in memory (one per rank and step) -> the newest snapshot with a part of every rank, if it may be restored
  -> one commit job per part, under a new lease -> the process that holds a part writes it to the store
  -> the process that holds rank 0's part commits
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from springtide.checkpoint.agreed import counting
from springtide.checkpoint.commit import CommitJob, Committed, PieceWriter, cut, tidy
from springtide.checkpoint.format import BLOCK_BYTES, BadFile, StagedPiece, committed, name_of
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.snapshot_parts import Snapshot, SnapshotPart, file_of, newest_whole
from springtide.checkpoint.writer_process import try_to_write
from springtide.storage import Folder, digest

PARTS_S = 600.0
"""How long the process that holds rank 0's part waits for the other holders to write their parts [s]."""


def to_commit(run: Folder, found: Sequence[SnapshotPart], config_fingerprint: str) -> list[SnapshotPart]:
    """Return the parts, by rank, of the newest complete snapshot in ``found`` (with a part of every rank). An empty list if no
    snapshot is complete, or if a checkpoint of the same or a later step is committed. Snapshots of another config, and
    snapshots that may not be restored (``agreed.counting``), are ignored."""
    parts = newest_whole(counting(run, [one for one in found if one.meta.config_fingerprint == config_fingerprint]))
    if parts and name_of(parts[0].meta.step) <= max(committed(run)[-1:], default=""):
        return []
    return parts


def jobs_for(
    run: Folder, term: int, parts: Sequence[SnapshotPart], config: dict[str, Any], rule: Rule
) -> list[CommitJob]:
    """Return the commit job (request to write) of each snapshot part under lease ``term``. The jobs have no pieces (tensor
    boxes); each process that holds a part adds the part's pieces. ``config``: the resolved config without secrets."""
    return [CommitJob(run.url, term, part.rank, part.meta, config, [], rule) for part in parts]


def write_part(job: CommitJob, snapshot: Snapshot, part: memoryview, tries: int) -> Committed | BaseException:
    """Write one rank's part of a snapshot to the store. For rank 0's part, also commit once all parts are written.

    The worker group that took the snapshot must not be training: it would overwrite the memory during the write.

    Args:
        job: the job of this part, without pieces.
        snapshot: description of the part, with its pieces.
        part: the bytes of the part.
        tries: largest number of tries if errors may be transient.

    Returns:
        ``Committed``, or the error. The error is BadFile if the pieces or their bytes have changed since the rank took the
        snapshot.
    """

    def view(piece: StagedPiece) -> memoryview:
        return part[piece.begin : piece.begin + piece.size_bytes]

    try:
        snapshot.check(snapshot.table)
    except BadFile as error:
        return error
    pieces = snapshot.pieces
    staged = [StagedPiece(*piece[:5], piece.begin, piece.size_bytes) for piece in pieces]
    job = dataclasses.replace(job, pieces=staged)
    for piece, copied in zip(pieces, staged, strict=True):
        for expected, block in zip(piece.digests, cut(view(copied), BLOCK_BYTES), strict=True):
            if (found := digest.of_bytes(block)) != expected:
                file = file_of(snapshot.key)
                return BadFile(f"{file}: {piece.tensor}: digest expected {expected}, found {found}", file)
    run, end_s = Folder(job.run_url), time.monotonic() + PARTS_S
    result: Committed | BaseException = try_to_write(
        PieceWriter(run), job, view, lambda: time.monotonic() > end_s, tries
    )
    if job.rank == 0 and isinstance(result, Committed):
        tidy(run, job)
    return result
