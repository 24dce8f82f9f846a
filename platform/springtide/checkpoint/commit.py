"""Write a checkpoint. Each rank writes its data file and its index. Then rank 0 writes the manifest and the commit marker.

    every rank:  pieces -> digests -> pieces that changed -> a0002-r0003.safetensors -> a0002-r0003.json (the index)
    rank 0:      index of every rank -> a0002-manifest.json -> COMMITTED, created only if absent -> old checkpoints are removed

A piece is the part of a tensor that a rank saves; the index lists a rank's pieces. In the names, a0002 is the number of the
lease and r0003 the rank. A rank writes its index after its data, so an index shows that the rank's bytes are in the store. The
writer processes of different ranks exchange nothing but these files. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from springtide.checkpoint import leases, retention
from springtide.checkpoint.agreed import agreed_step
from springtide.checkpoint.format import (
    ABANDONED,
    BLOCK_BYTES,
    COMMITTED,
    QUARANTINED,
    Manifest,
    Meta,
    Piece,
    StagedPiece,
    abandon,
    checkpoints,
    data_digest,
    data_name,
    index_name,
    is_good,
    listed,
    marked_by,
    marker_of,
    name_of,
    newest_before,
    read_index,
    read_manifest,
    step_of,
)
from springtide.checkpoint.verified_reads import Block, blocks_of, read_blocks
from springtide.errors import CheckpointError, RunExists
from springtide.faults import fault_point
from springtide.storage import Folder, digest, to_json

_PUT_BYTES = 8 * 2**20
_LEFT_S = 3600.0
"""A temporary file that has not been written to for this long was left by a killed writer and is removed [s]."""
_LOOK_S = (0.05, 1.0)
"""First and longest pause of rank 0 between two polls of the store for the indexes of all ranks [s]."""
_READERS = 8
_REREAD_BLOCKS = 4
"""Number of older blocks (4 MiB each) that a rank reads again and verifies in each save. Tensor parts that have not changed are
not written again: the new checkpoint refers to older files. So a damaged older file would also damage the new checkpoint."""
_MOST_INDEXES = 64
"""After a resize, a rank reads the indexes of the previous checkpoint (one per old rank) to find tensor parts that have not
changed. If there are more indexes than this, it writes all its tensor parts instead."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CommitJob:
    """A request to write one rank's part of one checkpoint."""

    run_url: str
    term: int
    rank: int
    meta: Meta
    config: dict[str, Any]
    pieces: list[StagedPiece]
    retention: retention.Rule
    owner: str = ""
    """Id of the driver or worker group that holds lease ``term``, the right to write the run; empty if unknown."""
    fault_points: str = ""
    """Address of the test that injects faults: the writer reports to it when it reaches a fault point. Empty outside of
    tests."""

    @property
    def name(self) -> str:
        return name_of(self.meta.step)


@dataclasses.dataclass(frozen=True)
class Committed:
    """Result of a ``CommitJob`` that succeeded."""

    name: str
    size_bytes: int
    """Size of the whole saved state; on ranks other than 0, size of the tensor parts that this rank writes."""
    written_bytes: int
    """Bytes written to the store; tensor parts that have not changed since the previous checkpoint are not written."""


class PieceWriter:
    """Writes one rank's part of each checkpoint: the tensor parts (pieces) that this rank saves. One checkpoint at a time."""

    def __init__(self, run: Folder) -> None:
        self._run = run
        self._known: dict[Any, Piece] = {}
        """Pieces (stored tensor parts) of the previous checkpoint, by ``Piece.box``. A save writes only pieces that differ from
        them."""
        self._known_of: tuple[str, bytes] = ("", b"")
        """Name and commit marker of the checkpoint that the pieces in ``_known`` belong to."""
        self._known_for: tuple[int, str] = (0, "")
        """Lease number and checkpoint name of the job for which ``_known`` was last computed."""
        self._written: tuple[str, int, list[Piece]] = ("", 0, [])
        """Checkpoint name, lease number and pieces of the job that this writer wrote last."""
        self._rotten_for: tuple[int, str] = (0, "")
        """Lease number and checkpoint name of the job for which ``_known_rotten`` was last computed."""
        self._known_rotten: set[Any] = set()
        """Boxes of unchanged pieces whose bytes in older files were found damaged; this job writes these pieces again."""
        self._noted = 0
        """Number of the last lease whose first commit this writer has recorded in the run's lease files."""

    def write(self, job: CommitJob, view: Callable[[StagedPiece], memoryview], gone: Callable[[], bool]) -> Committed:
        """Write this rank's part; on rank 0, commit once every rank has written its part.

        ``view`` returns the bytes of a piece (part of a tensor). ``gone`` returns True if rank 0 must stop waiting for the
        other ranks. Raises OSError if a retry may help, CheckpointError or RunExists if a retry cannot help.
        """
        if marker_of(self._run, job.name) is not None:  # committed already: by an earlier try, or by another lease
            manifest = read_manifest(self._run, job.name)
            if is_same_state(manifest.meta, job.meta):
                return Committed(job.name, manifest.size_bytes, 0)
            if not job.rank:
                leases.check(self._run, job.term, job.owner)
                abandon(self._run, [job.name], "another lease trained the same step otherwise", job.term)
        pieces, written = self._part(job, view)
        if job.rank:
            return Committed(job.name, sum(piece.size_bytes for piece in pieces), written)
        manifest = commit(self._run, job, gone)
        if self._noted != job.term:
            leases.note_commit(self._run, job.term)
            self._noted = job.term
        return Committed(job.name, manifest.size_bytes, manifest.written_bytes)

    def _part(self, job: CommitJob, view: Callable[[StagedPiece], memoryview]) -> tuple[list[Piece], int]:
        folder, own = checkpoints(self._run) / job.name, f"{job.name}/{data_name(job.term, job.rank)}"
        # a piece with the same box and digests as in the previous checkpoint is not written again
        pieces, known = [], self._base(job)
        for staged in job.pieces:
            digests = tuple(digest.of_bytes(block) for block in cut(view(staged), BLOCK_BYTES))
            piece = Piece(*staged[:5], own, 0, staged.size_bytes, digests)
            same = known.get(piece.box)
            pieces.append(same if same is not None and same.digests == digests else piece)
        rotten = self._rotten(job, [piece for piece in pieces if piece.file != own])
        pieces = [piece._replace(file=own) if piece.box in rotten else piece for piece in pieces]
        changed = [staged for staged, piece in zip(job.pieces, pieces, strict=True) if piece.file == own]
        header, begins = header_of(changed)
        pieces = [piece._replace(begin=begins[piece.tensor]) if piece.file == own else piece for piece in pieces]
        index: dict[str, Any] = {"size_bytes": 0}
        if changed:
            views = [block for staged in changed for block in cut(view(staged), _PUT_BYTES)]
            folder.put(data_name(job.term, job.rank), [memoryview(header), *views])
            of_tensor = {piece.tensor: piece for piece in pieces}
            in_file = [of_tensor[staged.tensor] for staged in changed]
            head = digest.of_bytes(header)
            index = {"header_bytes": len(header), "header_digest": head, "digest": data_digest(head, in_file)}
            index["size_bytes"] = len(header) + sum(piece.size_bytes for piece in in_file)
        folder.write(index_name(job.term, job.rank), to_json({**index, "pieces": pieces}))
        self._written = job.name, job.term, pieces
        return pieces, index["size_bytes"]

    def _rotten(self, job: CommitJob, unchanged: Sequence[Piece]) -> set[Any]:
        """Verify a few blocks in older files that hold ``unchanged`` pieces (tensor parts). The blocks are chosen at random,
        with the step as seed. Returns ``Piece.box`` of each piece with a damaged or unreadable block. All tries of a job use
        the result of the first try: otherwise a second try could write other bytes than those that rank 0 has already
        committed."""
        if (job.term, job.name) != self._rotten_for:
            blocks = [block for piece in unchanged for block in blocks_of(piece)]
            drawn = random.Random(int(job.meta.step)).sample(blocks, min(_REREAD_BLOCKS, len(blocks)))
            with ThreadPoolExecutor(_REREAD_BLOCKS, "springtide-reread") as threads:
                good = threads.map(self._is_good, drawn)
                self._known_rotten = {one.piece.box for one, is_good in zip(drawn, good, strict=True) if not is_good}
            self._rotten_for = job.term, job.name
        return self._known_rotten

    def _is_good(self, block: Block) -> bool:
        try:
            read_blocks(checkpoints(self._run), [block])
        except (CheckpointError, OSError) as error:
            _log.warning("%s; this save writes the data again; older checkpoints that use these bytes are bad", error)
            return False
        return True

    def _base(self, job: CommitJob) -> dict[Any, Piece]:
        """Return the pieces (stored tensor parts) of the previous checkpoint, by ``Piece.box``. The save writes only pieces
        that differ from them."""
        # all tries of a job use the same result and write the same bytes, because rank 0 may have committed an earlier try
        if (job.term, job.name) == self._known_for:
            return self._known
        self._known_for = job.term, job.name
        # compare the marker, not only the step: another lease may have committed the step again and removed the known files
        last, marker = this = newest_before(self._run, job.name)
        if this == self._known_of:
            return self._known
        self._known_of, self._known = this, {}
        if not last:
            return {}
        if (last, _term_in(marker)) == self._written[:2]:  # this writer wrote it: no need to read its index
            self._known = {piece.box: piece for piece in self._written[2]}
            return self._known
        with contextlib.suppress(CheckpointError):  # if an index is damaged, write its pieces again
            manifest, folder = read_manifest(self._run, last), checkpoints(self._run) / last
            mine = index_name(manifest.term, job.rank)
            same_size = manifest.meta.world_size == job.meta.world_size
            # after a resize, the index of any old rank may list a box of this rank. If there are many indexes, none is read:
            # writing all pieces again costs less
            others = manifest.indexes if len(manifest.indexes) <= _MOST_INDEXES else []
            for name in [mine] if same_size else others:
                _, pieces = read_index(folder, name, manifest.files[name]["digest"])
                self._known |= {piece.box: piece for piece in pieces}
        return self._known


def commit(run: Folder, job: CommitJob, gone: Callable[[], bool]) -> Manifest:
    """Wait until every rank has written its index, write the manifest, and create the commit marker. Returns the manifest.

    If another lease commits the same state during the wait, the manifest of that lease is returned: ranks that saw that commit
    write no index, so the wait would never end. Raises RunExists if a newer lease holds the run. Raises CheckpointError if
    ``gone`` returns True (the save was canceled) before every index exists.
    """
    folder = checkpoints(run) / job.name
    names = [index_name(job.term, rank) for rank in range(job.meta.world_size)]
    pause = _LOOK_S[0]
    while not set(names) <= (there := set(folder.names())):
        if is_good(there) and is_same_state((found := read_manifest(run, job.name)).meta, job.meta):
            return found
        if gone():
            raise CheckpointError(f"{job.name}: not every rank wrote its part")
        time.sleep(pause)  # the pause doubles after each poll, up to a second
        pause = min(2 * pause, _LOOK_S[1])
    with ThreadPoolExecutor(_READERS, "springtide-commit") as threads:
        contents = dict(zip(names, threads.map(folder.read, names), strict=True))
    manifest, data = _written(folder, _manifest(job, contents))
    marks = {ABANDONED, QUARANTINED} & set(folder.names())
    leases.check(run, job.term, job.owner)
    if any(marked_by(run, job.name, mark) > job.term for mark in marks):
        raise RunExists(f"lease {job.term} of {run.url} may not write any more: a newer lease has marked {job.name}")
    marker = to_json({"manifest": manifest.name, "digest": digest.of_bytes(data), "term": job.term}).encode()
    for mark in (COMMITTED, *marks) if marks else ():  # COMMITTED first: alone it would make the checkpoint usable
        folder.remove(mark)
    fault_point("commit", "before")
    try:
        folder.create(COMMITTED, marker, lambda: leases.check(run, job.term, job.owner))
    except FileExistsError:
        if folder.read(COMMITTED) != marker:  # if equal, this is our own write, whose response was lost
            found = read_manifest(run, job.name)  # another lease committed this step first
            if not is_same_state(found.meta, job.meta):
                raise OSError(f"{job.name} was committed at the same moment by lease {found.term}") from None
            return found
    fault_point("commit", "after")
    return manifest


def _term_in(marker: bytes) -> int:
    """Return the number of the lease that a commit marker (contents of COMMITTED) names; 0 if the marker cannot be parsed."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return int(json.loads(marker)["term"])
    return 0


def is_same_state(one: Meta, other: Meta) -> bool:
    """Return True if two checkpoints have the same state: the same steps of the same data order, trained with the same
    settings."""
    return (one.step, one.order_identity, one.config_fingerprint, one.chain) == (
        *(other.step, other.order_identity, other.config_fingerprint, other.chain),
    )


def _written(folder: Folder, manifest: Manifest) -> tuple[Manifest, bytes]:
    """Write the manifest and return it with its bytes. If an earlier try of the job wrote a manifest for the same files,
    return the earlier manifest: it may be committed already."""
    data = manifest.model_dump_json().encode()
    try:
        folder.create(manifest.name, data)
    except FileExistsError:
        with contextlib.suppress(ValueError):
            before = folder.read(manifest.name)
            found = Manifest.model_validate_json(before)
            if found.files == manifest.files and is_same_state(found.meta, manifest.meta):
                return found, before
        folder.write(manifest.name, data)
    return manifest, data


def _manifest(job: CommitJob, contents: dict[str, bytes]) -> Manifest:
    files: dict[str, dict[str, Any]] = {}
    refers, size = set(), 0
    for rank, (name, data) in enumerate(contents.items()):
        files[name] = {"size_bytes": len(data), "digest": digest.of_bytes(data)}
        index = json.loads(data)
        if index["size_bytes"]:
            files[data_name(job.term, rank)] = {key: index[key] for key in ("size_bytes", "digest")}
        for *_, file, _begin, piece_bytes, _digests in index["pieces"]:
            size += piece_bytes
            refers |= {file} if not file.startswith(f"{job.name}/") else set()
    return Manifest(
        term=job.term,
        meta=job.meta,
        config=job.config,
        files=files,
        refers=tuple(sorted(refers)),
        size_bytes=size,
    )


KnownCheckpoints = dict[tuple[str, frozenset[str]], retention.Found]
"""Cache for ``tidy``: (checkpoint, names of its files) -> facts from its manifest that decide whether it is kept. An entry is
valid while the checkpoint's folder holds the same file names."""


def tidy(run: Folder, job: CommitJob, known: KnownCheckpoints | None = None) -> None:
    """Remove old checkpoints after a commit. The retention rule chooses the checkpoints to keep; files that a kept checkpoint
    needs stay too. Commit markers are removed first, so a half-removed checkpoint never counts as committed. Files that cannot
    be removed now are removed after a later save.

    ``known``: cache of the manifests that earlier calls read in this run; updated in place. With it, only the manifests of
    the newest ``retention.last`` checkpoints are read again: they must be readable before older checkpoints are removed."""
    try:
        _tidy(run, job, {} if known is None else known)
    except OSError as error:
        _log.warning("older checkpoints of %s could not be removed: %s", run.url, error)


def _tidy(run: Folder, job: CommitJob, known: KnownCheckpoints) -> None:
    found: dict[str, retention.Found] = {}
    bad: set[str] = set()
    contents = listed(run)
    before = {name: one for name, files in contents.items() if (one := known.get((name, frozenset(files))))}
    for name in sorted(name for name, files in contents.items() if is_good(files))[-max(job.retention.last, 1) :]:
        before.pop(name, None)
    known.clear()
    for name, files in contents.items():
        if name in before:
            found[name] = known[name, frozenset(files)] = before[name]
            continue
        manifest, needs = None, set()
        if COMMITTED in files:
            try:
                manifest = read_manifest(run, name)
                needs = {f"{name}/{file}" for file in (manifest.name, *manifest.files)} | set(manifest.refers)
            except CheckpointError:  # unreadable: keep all older files, as this checkpoint may refer to any of them
                bad.add(name)
                needs = {f"{older}/{file}" for older, others in contents.items() if older <= name for file in others}
        found[name] = retention.Found(
            files=frozenset(files),
            counts=manifest is not None and is_good(files),
            metrics=manifest.meta.metrics if manifest else {},
            needs=frozenset(needs),
            agreed_step=agreed_step(manifest.meta) if manifest else None,
        )
        if manifest is not None:
            known[name, frozenset(files)] = found[name]
    folder, reading = checkpoints(run), retention.being_read(run) | bad
    marks = [file for file in retention.garbage(found, job.retention, reading, job.term) if file.endswith(COMMITTED)]
    removed = {file: folder.read(file) for file in marks}
    folder.remove_files(marks)
    if marks:  # a process may have begun to read one of these checkpoints meanwhile: put back its marker
        now = retention.being_read(run) | bad
        for file in marks:
            if file.partition("/")[0] in now - reading:
                folder.write(file, removed[file])
        reading = now
    doomed = retention.garbage(found, job.retention, reading, job.term)
    folder.remove_files([file for file in doomed if not file.endswith(COMMITTED)])
    for name in folder.names() if folder.is_local else []:  # object stores have no empty folders
        if step_of(name) is not None and name < job.name:
            if name not in reading:
                (folder / name).sweep(_LEFT_S)  # remove temporary files of ranks that were killed while they wrote
            (folder / name).remove_if_empty()


def header_of(pieces: Sequence[StagedPiece]) -> tuple[bytes, dict[str, int]]:
    """Return the safetensors header of a data file, and name of a tensor -> offset of its piece in the file [bytes].

    Format: 8 bytes of length, JSON, the bytes of the tensors without gaps (github.com/huggingface/safetensors).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "springtide"}}
    begin, begins = 0, {}
    for piece in pieces:
        end = begin + piece.size_bytes
        header[piece.tensor] = {"dtype": piece.dtype, "shape": piece.sizes, "data_offsets": [begin, end]}
        if piece.sizes != piece.shape:
            place = {"shape": piece.shape, "offsets": piece.offsets}
            header["__metadata__"][piece.tensor] = to_json(place)
        begins[piece.tensor] = begin
        begin = end
    text = to_json(header).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    return data, {name: len(data) + place for name, place in begins.items()}


def cut(data: memoryview, size: int) -> Iterator[memoryview]:
    """Yield ``data`` in blocks of ``size`` bytes; the last block may be shorter. Empty ``data`` gives one empty block."""
    yield from (data[begin : begin + size] for begin in range(0, max(data.nbytes, 1), size))
