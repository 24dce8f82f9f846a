"""File layout of checkpoints. A checkpoint counts (a run may restore it) if it is committed, not abandoned and not quarantined.

<run>/checkpoints/step-0000000050/   a0002-r0000.safetensors   tensors that rank 0 wrote in lease 2
                                     a0002-r0000.json          its index: place of each piece, digests of the piece's blocks
                                     a0002-manifest.json       size and digest of every file, and the state's metadata
                                     COMMITTED                 created last: completes the checkpoint, names its manifest
                                     ABANDONED                 the run resumed from an older checkpoint: in another data
                                                               order, or because a device had computed wrong results
                                     QUARANTINED               stored bytes differ from those committed; holds the reason

A tensor is stored in pieces. A piece is a box (rectangular part) of the tensor that one rank held. A piece that has not changed
since the previous checkpoint is not written again: the index refers to the older file. Any safetensors tool can read the data
files.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from springtide.checkpoint import validate
from springtide.config.steps import OrderStep, StepsDone
from springtide.errors import CheckpointError, DamagedFile
from springtide.storage import Folder, digest, to_json
from springtide.storage.folder import first_problem

COMMITTED = "COMMITTED"
ABANDONED = "ABANDONED"
QUARANTINED = "QUARANTINED"
AVERAGED = "averaged"
"""Key in ``Meta.labels`` of a checkpoint that holds averaged weights only. Its value: the names of the averaged checkpoints."""
IMPORTED = "imported"
"""Key in ``Meta.labels`` of a checkpoint that holds imported weights only. Its value: the source of the weights."""
FISHER = "fisher"
"""Key in ``Meta.labels`` of a checkpoint that holds a Fisher information (importance of each weight) instead of weights. Its
value: the manifest digest of the checkpoint for whose weights it was computed."""
BLOCK_BYTES = 4 * 2**20
"""Size of a block, the unit of digests. A reader of part of a tensor reads and verifies only the blocks that overlap it."""
FORMAT = 6
_NAME = re.compile(r"step-(\d{10})")

Identity = Callable[[StepsDone], str]
"""Function: number of steps done -> hash over everything that determines which rows these steps train on, and in which
order."""


class BadFile(CheckpointError):
    """One rank read bytes of a checkpoint file that differ from the committed bytes."""

    def __init__(self, message: str, file: str = "") -> None:
        """``file``: path of the bad file below ``checkpoints/``."""
        super().__init__(message)
        self.file = file


class OtherFormat(CheckpointError):
    """The checkpoint is intact, but another version of this package wrote it."""


class Meta(BaseModel):
    """Metadata of a saved state: everything that is not a tensor, and which run, code and settings produced the state.

    The learning rate, the position in the data, and the seed of every random generator are not stored. They are functions
    of the step, and the loop computes them at each step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: StepsDone = Field(ge=0)
    """Steps done; training resumes with the next step."""
    tokens: int = Field(ge=0)
    chain: str = Field("", pattern="^([0-9a-f]{32})?$")
    """Hash over all steps done (``stream/chain.py``); empty before the first step, and for a user's own training loop."""
    skipped_updates: tuple[OrderStep, ...] = ()
    """Steps, by index in the data order, whose weight update was skipped: the gradient norm was not finite, or a loss spike was
    detected. Ascending; at most the newest 1000."""
    world_size: int = Field(ge=1)
    order_identity: str
    config_fingerprint: str
    code_fingerprint: str = ""
    """Fingerprint of the source of this package."""
    tokenizer_digest: str = Field("", pattern="^([0-9a-f]{32})?$")
    """Digest of the ``tokenizer.json`` that the token ids belong to; empty if unknown."""
    saved_s: float = 0.0
    """When the save was requested, seconds since 1970."""
    metrics: dict[str, float] = {}
    """Metrics by which the best checkpoints to keep may be chosen. Values that are not finite are dropped: JSON has no NaN, and
    the loss of one bad step must not make a checkpoint unreadable."""
    components: dict[str, Any] = {}
    """Name of a component besides model and optimizer, such as a gradient scaler -> its state as plain JSON data."""
    labels: dict[str, str] = {}

    def adding(self, components: dict[str, Any], metrics: dict[str, float] | None = None) -> Meta:
        """Return a copy to which ``components`` and the finite values of ``metrics`` are added."""
        finite = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
        return self.model_copy(update={"components": self.components | components, "metrics": self.metrics | finite})

    @field_validator("metrics", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        bad = (None, math.inf, -math.inf)  # the test ``v == v`` drops NaN, which differs from itself
        return {k: v for k, v in value.items() if v not in bad and v == v} if isinstance(value, dict) else value


class StagedPiece(NamedTuple):
    """A box (rectangular part) of a tensor to be written, and the offset and size of its bytes in the staging buffer."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    size_bytes: int


class Piece(NamedTuple):
    """A box (rectangular part) of a tensor, and the file, offset and size of its bytes, which are row-major."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Data file that holds the bytes, as a path below ``checkpoints/``."""
    begin: int
    """Offset in the file [bytes]."""
    size_bytes: int
    digests: tuple[str, ...]
    """Digest of each block (BLOCK_BYTES) of the piece's bytes; the last block may be shorter."""

    @property
    def box(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Tensor name, type, shape, offsets and sizes: the piece without the file and offset of its bytes."""
        return self[:5]


class Manifest(BaseModel):
    """The manifest of a checkpoint: the state's metadata, and all files with their sizes and digests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    term: int
    meta: Meta
    config: dict[str, Any]
    """Config of the run with all defaults filled in; empty for a user's own training loop."""
    files: dict[str, dict[str, Any]]
    """Files in the checkpoint's own folder: name -> ``size_bytes`` and ``digest``. The digest of a data file is computed over
    the digests of its header and blocks."""
    refers: tuple[str, ...] = ()
    """Files of older checkpoints that hold unchanged pieces of this checkpoint, as paths below ``checkpoints/``."""
    size_bytes: int = Field(ge=0)
    """Size of all pieces, including those in files of older checkpoints."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        validate.check_files(self.files, self.refers)
        return self

    @property
    def name(self) -> str:
        """Name of the manifest's file."""
        return file_name(self.term, "manifest.json")

    @property
    def indexes(self) -> list[str]:
        return [name for name in self.files if name.endswith(".json")]

    @property
    def written_bytes(self) -> int:
        """Size of the checkpoint's own files; tensor parts in files of older checkpoints are not counted."""
        return sum(file["size_bytes"] for file in self.files.values())


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint that is saved after ``step`` steps."""
    return f"step-{step:010d}"


def step_of(name: str) -> StepsDone | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    found = _NAME.fullmatch(name)
    return StepsDone(int(found[1])) if found else None


def file_name(term: int, what: str) -> str:
    """Return the name of a file that the holder of lease ``term`` writes. The lease number is part of the name, so two writers
    never overwrite each other's files."""
    return f"a{term:04d}-{what}"


def term_of(file: str) -> int | None:
    """Return the number of the lease that wrote ``file``, from the file's name. None for markers like COMMITTED, whose names
    have no number."""
    found = re.match(r"a(\d{4,})-", file)
    return int(found[1]) if found else None


def data_name(term: int, rank: int) -> str:
    """Return the name of the data file that a rank writes."""
    return file_name(term, f"r{rank:04d}.safetensors")


def index_name(term: int, rank: int) -> str:
    """Return the name of the index that a rank writes: the list of its tensor parts, and where their bytes are stored."""
    return file_name(term, f"r{rank:04d}.json")


def checkpoints(run: Folder) -> Folder:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def listed(run: Folder) -> dict[str, set[str]]:
    """Return all checkpoints, in any state: name -> names of the files in its folder, oldest first."""
    found: dict[str, set[str]] = {}
    for path in checkpoints(run).files():
        name, _, file = path.partition("/")
        if step_of(name) is not None and file:
            found.setdefault(name, set()).add(file)
    return found


def is_good(files: set[str]) -> bool:
    """Return True if a checkpoint whose folder holds ``files`` counts: committed, and neither abandoned nor quarantined."""
    return COMMITTED in files and not files & {ABANDONED, QUARANTINED}


def marker_of(run: Folder, name: str) -> bytes | None:
    """Return the bytes of a checkpoint's commit marker; None if the checkpoint is not committed, or is abandoned or
    quarantined. Does not list the folder, which holds thousands of names in a large run."""
    folder = checkpoints(run) / name
    marker = _read_if_there(folder, COMMITTED)
    if marker is None or any(_read_if_there(folder, mark) is not None for mark in (ABANDONED, QUARANTINED)):
        return None
    return marker


def newest_before(run: Folder, name: str) -> tuple[str, bytes]:
    """Return the newest checkpoint older than ``name`` that counts (committed, neither abandoned nor quarantined), and the
    bytes of its commit marker; two empty values if there is none. The number of requests to the store depends neither on the
    number of ranks nor on the number of checkpoints."""
    older = [one for one in checkpoints(run).names() if step_of(one) is not None and one < name]
    for one in reversed(older):
        if (marker := marker_of(run, one)) is not None:
            return one, marker
    return "", b""


def _read_if_there(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(name)
    except (FileNotFoundError, IsADirectoryError):
        return None


def committed(run: Folder) -> list[str]:
    """Return the names of the committed checkpoints that are neither abandoned nor quarantined, oldest first."""
    return [name for name, files in listed(run).items() if is_good(files)]


def read_manifest(run: Folder, name: str) -> Manifest:
    """Return the manifest of checkpoint ``name``. The checkpoint's commit marker contains the name of the manifest's file.

    Raises BadFile if the manifest or the marker is missing or differs from the committed bytes, OtherFormat if another version
    of this package wrote the manifest, OSError if the store cannot be read.
    """
    folder, marked = checkpoints(run) / name, f"{name}/{COMMITTED}"
    try:
        marker = folder.read_json(COMMITTED)
        validate.check_manifest_name(marker["manifest"])
        data = folder.read(marker["manifest"])
        if (found := digest.of_bytes(data)) != marker["digest"]:
            raise BadFile(f"{marker['manifest']}: digest expected {marker['digest']}, found {found}", marked)
        written = json.loads(data)["format"]
        if written != FORMAT:
            raise OtherFormat(
                f"{name} of {run.url} is in format {written!r:.40}, this version of springtide reads {FORMAT}: use the "
                "version that wrote it, or a new run.id"
            )
        manifest = Manifest.model_validate_json(data)
        if manifest.meta.step != step_of(name):
            raise ValueError(f"the manifest has step {manifest.meta.step}, but the folder is named after another step")
        return manifest
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadFile(f"{name}: a file is missing: {error}", marked) from None
    except ValidationError as error:
        unknown = [".".join(map(str, one["loc"]))[:100] for one in error.errors() if one["type"] == "extra_forbidden"]
        if unknown:  # the digest was right, so the manifest is intact, but a newer version wrote it
            raise OtherFormat(
                f"{name} of {run.url} has {unknown[0]}, which this version of springtide does not know: use the version that "
                "wrote it, or a new run.id"
            ) from None
        raise BadFile(f"{name}: the manifest cannot be understood: {first_problem(error)}", marked) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # not JSON, or not what this version writes
        raise BadFile(f"{name}: manifest or commit marker cannot be understood: {error}", marked) from None


def read_index(folder: Folder, name: str, expected: str = "") -> tuple[dict[str, Any], list[Piece]]:
    """Read the index ``name`` of one rank. Returns facts about the rank's data file (sizes, digests) and the rank's pieces
    (tensor parts). Raises BadFile if the index is missing or invalid, or if its digest is not ``expected`` (empty: the digest
    is not checked)."""
    file = f"{folder.name}/{name}"
    try:
        data = folder.read(name)
    except (FileNotFoundError, IsADirectoryError):
        raise BadFile(f"{name}: a file is missing: {file}", file) from None
    except DamagedFile as error:
        raise BadFile(f"{name}: {error}", file) from None
    if expected and (found := digest.of_bytes(data)) != expected:
        raise BadFile(f"{name}: digest expected {expected}, found {found}", file)
    try:
        index = json.loads(data)
        pieces = [_piece(*fields) for fields in index.pop("pieces")]
        validate.check_facts(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"{name}: the index cannot be understood: {error}", file) from None
    return index, pieces


def _piece(
    tensor: str, dtype: str, shape: Any, offsets: Any, sizes: Any, file: str, begin: int, size_bytes: int, digests: Any
) -> Piece:
    if not isinstance(tensor, str):
        raise TypeError(f"{tensor!r} cannot be the name of a tensor")
    validate.check_piece(dtype, shape, offsets, sizes, file, begin, size_bytes, digests, BLOCK_BYTES)
    return Piece(tensor, dtype, tuple(shape), tuple(offsets), tuple(sizes), file, begin, size_bytes, tuple(digests))


def data_digest(header_digest: str, pieces: Iterable[Piece]) -> str:
    """Return the digest of a data file: a digest over the digests of its header and of the blocks of ``pieces``, in order."""
    return digest.of_bytes("".join([header_digest, *(one for piece in pieces for one in piece.digests)]).encode())


class _MarkNote(BaseModel):
    reason: str
    term: int = 0


_NOTE = TypeAdapter(_MarkNote)


def quarantine(run: Folder, name: str, reason: str, term: int = 0) -> None:
    """Mark a checkpoint as quarantined (its bytes are bad), so that no restore uses it. Its files stay for inspection until
    retention removes them. ``term``: number of the lease whose holder marks it."""
    _mark(run, name, QUARANTINED, reason, term)


def abandon(run: Folder, names: Iterable[str], reason: str, term: int = 0) -> None:
    """Mark checkpoints as abandoned, so that the run does not resume from them. Their files stay until retention removes them.
    ``term``: number of the lease whose holder marks them."""
    for name in names:
        _mark(run, name, ABANDONED, reason, term)


def _mark(run: Folder, name: str, mark: str, reason: str, term: int) -> None:
    note = {"reason": reason, "time_s": time.time(), "term": term}
    checkpoints(run).write(f"{name}/{mark}", to_json(note))


def marked_by(run: Folder, name: str, mark: str) -> int:
    """Return the number of the lease that marked a checkpoint with ``mark`` (ABANDONED or QUARANTINED); 0 if there is no such
    mark, or if the mark contains no lease number."""
    try:
        return checkpoints(run).read_as(f"{name}/{mark}", _NOTE).term
    except (FileNotFoundError, IsADirectoryError, DamagedFile):
        return 0


def reason_of(run: Folder, name: str, mark: str) -> str:
    """Return the reason that is stored in the marker file ``mark`` of a checkpoint, for display."""
    try:
        return checkpoints(run).read_as(f"{name}/{mark}", _NOTE).reason
    except (OSError, DamagedFile) as error:
        return f"its note cannot be read ({error})"


def check(name: str, data: bytes | memoryview, expected: str) -> None:
    """Raise CheckpointError, with ``name`` in the message, if the digest of ``data`` is not ``expected``."""
    check_digest(name, digest.of_bytes(data), expected)


def check_digest(name: str, found: str, expected: str) -> None:
    """Raise CheckpointError, with ``name`` in the message, if the digest ``found`` is not ``expected``."""
    if found != expected:
        raise CheckpointError(f"{name}: digest expected {expected}, found {found}")
