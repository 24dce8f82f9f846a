"""List the checkpoints of a run with their states, and verify every byte on request."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from springtide.checkpoint.format import (
    ABANDONED,
    COMMITTED,
    QUARANTINED,
    Manifest,
    Piece,
    check,
    checkpoints,
    listed,
    read_index,
    read_manifest,
    reason_of,
    step_of,
)
from springtide.checkpoint.verified_reads import check_pieces
from springtide.errors import CheckpointError
from springtide.storage import Folder

_READERS = 4


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A checkpoint and its state, as ``springtide inspect`` shows it."""

    name: str
    step: int
    state: str
    """``committed``, ``uncommitted`` (being written, or left by a killed save), ``referred`` (kept because newer
    checkpoints refer to its files), ``abandoned``, ``quarantined`` or ``bad``."""
    reason: str = ""
    """Why the checkpoint is bad, quarantined or abandoned; empty in other states."""
    manifest: Manifest | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Name, step, state, reason, and the facts in the manifest, as plain data for JSON."""
        found: dict[str, Any] = {"name": self.name, "step": self.step, "state": self.state, "reason": self.reason}
        if self.manifest is not None:
            manifest = self.manifest
            found |= {**manifest.meta.model_dump(mode="json"), "term": manifest.term, "refers": manifest.refers}
            found |= {"size_bytes": manifest.size_bytes, "written_bytes": manifest.written_bytes}
        return found

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.state}"]
        if self.manifest is not None:
            meta, size = self.manifest.meta, self.manifest.size_bytes
            new = f" ({self.manifest.written_bytes / 2**20:.1f} MiB new)" if self.manifest.refers else ""
            parts.append(f"{size / 2**20:.1f} MiB{new}, world size {meta.world_size}, {_age(meta.saved_s)} old")
        return ", ".join(parts) + (f": {self.reason}" if self.reason else "")


def inspect(run: Folder, verify: bool = False, only: str = "") -> list[Inspected]:
    """Return every checkpoint of a run, oldest first, or only the one named ``only``. ``verify``: read and verify all bytes of
    committed checkpoints that are neither abandoned nor quarantined."""
    found = [inspect_one(run, name, files, verify) for name, files in listed(run).items() if only in ("", name)]
    referred = {file.split("/")[0] for one in found if one.manifest is not None for file in one.manifest.refers}
    return [
        dataclasses.replace(one, state="referred") if one.state == "uncommitted" and one.name in referred else one
        for one in found
    ]


def inspect_one(run: Folder, name: str, files: set[str], verify: bool) -> Inspected:
    """Return the checkpoint ``name`` with its state. ``files``: file names in its folder. ``verify``: read and verify all
    bytes."""
    state, reason = "committed", ""
    manifest = None
    if COMMITTED in files:
        try:
            manifest = read_manifest(run, name)
        except CheckpointError as error:
            state, reason = "bad", str(error)
    else:
        state = "uncommitted"
    if QUARANTINED in files:
        state, reason = "quarantined", reason_of(run, name, QUARANTINED)
    elif ABANDONED in files:
        state, reason = "abandoned", reason_of(run, name, ABANDONED)
    elif manifest is not None and verify:
        reason = problem(run, name, manifest)
        state = "bad" if reason else state
    return Inspected(name, step_of(name) or 0, state, reason, manifest)


def problem(run: Folder, name: str, manifest: Manifest) -> str:
    """Verify all bytes of a checkpoint, including those in files of older checkpoints that it uses. Returns a description of
    the first problem; empty if all bytes are good."""
    folder = checkpoints(run)
    try:
        pieces: list[Piece] = []
        for file in manifest.indexes:
            facts, found = read_index(folder / name, file, manifest.files[file]["digest"])
            pieces += found
            if facts["size_bytes"]:
                _check_header(folder, f"{name}/{file.removesuffix('.json')}.safetensors", facts)
        check_pieces(folder, pieces, _READERS)
        return ""
    except (CheckpointError, FileNotFoundError, IsADirectoryError) as error:
        return str(error)


def _check_header(folder: Folder, file: str, facts: dict[str, Any]) -> None:
    check(f"{file}: header", folder.read_range(file, 0, facts["header_bytes"]), facts["header_digest"])
    size = folder.size(file)
    if size != facts["size_bytes"]:
        raise CheckpointError(f"{file} has {size} bytes, {facts['size_bytes']} were committed")


def _age(saved_s: float) -> str:
    seconds = max(0.0, time.time() - saved_s)  # the age is negative if the clock of the machine that saved was ahead
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
