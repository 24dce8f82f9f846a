"""Where checkpoints lie and which of them count.

<run>/checkpoints/step-0000000050/   a0002-r0000.safetensors   tensors that rank 0 wrote in lease 2
                                     a0002-r0000.json          its index: where pieces lie, the digests of their blocks
                                     a0002-manifest.json       every file's size and digest, and what the state is
                                     COMMITTED                 created last, names the manifest; no checkpoint without it
                                     ABANDONED                 the run went on from an older one in another order
                                     QUARANTINED               its bytes are not those that were committed; the reason

A tensor is stored in pieces, boxes of it, one a rank that held one. A piece that has not changed since the checkpoint
before is not written again: the index refers to the file that has it. Data files are safetensors: any tool opens them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from springtide.checkpoint import validate
from springtide.errors import CheckpointError
from springtide.store import Folder, digest

COMMITTED = "COMMITTED"
ABANDONED = "ABANDONED"
QUARANTINED = "QUARANTINED"
BLOCK_BYTES = 4 * 2**20
"""What a digest stands for: a reader of part of a tensor verifies the blocks it touches."""
MARK_BYTES = 64
"""Before the tensors in shared memory: which step they are of, as int64; NO_STEP while they are being copied."""
NO_STEP = -1
FORMAT = 4
_NAME = re.compile(r"step-(\d{10})")

Identity = Callable[[int], str]
"""Steps done -> the identity of the order that they were trained in."""


class BadFile(CheckpointError):
    """A file of a checkpoint whose bytes are not those that were committed, as one rank read it."""

    def __init__(self, message: str, file: str = "") -> None:
        """``file``: its path below ``checkpoints/``."""
        super().__init__(message)
        self.file = file


class OtherFormat(CheckpointError):
    """A checkpoint that is good, but written by another version of this package."""


class Meta(BaseModel):
    """The part of a run's state that is not tensors, and where it came from.

    Whatever is a function of the step is not here: learning rate, position in the data, and the seed of every random
    generator, which the loop derives anew at each step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    """Steps done; the next one is trained on after a restore."""
    tokens: int = Field(ge=0)
    world_size: int = Field(ge=1)
    order_identity: str
    config_fingerprint: str
    code_fingerprint: str = ""
    """Of the source of this package."""
    tokenizer_digest: str = Field("", pattern="^([0-9a-f]{32})?$")
    """Of the ``tokenizer.json`` that gives its ids a meaning; empty where nothing is known of it."""
    saved_s: float = 0.0
    """When it was asked for, seconds since 1970."""
    metrics: dict[str, float] = {}
    """What retention may choose the best by."""
    components: dict[str, Any] = {}
    """State of what is neither model nor optimizer (a gradient scaler), each as plain data."""
    labels: dict[str, str] = {}


class StagedPiece(NamedTuple):
    """A box of a tensor that is to be written, and where its bytes lie in the stage."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    size_bytes: int


class Piece(NamedTuple):
    """A box of a tensor, and where its bytes lie, row-major."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Below ``checkpoints/``."""
    begin: int
    """Offset in the file [bytes]."""
    size_bytes: int
    digests: tuple[str, ...]
    """Of its blocks of BLOCK_BYTES, the last of which may be shorter."""

    @property
    def box(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What it is, wherever it lies."""
        return self[:5]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One rank's part of a snapshot, as its keeper is told of it."""

    term: int
    rank: int
    meta: Meta
    pieces: tuple[StagedPiece, ...]
    size_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Attempt, step, rank."""
        return self.term, self.meta.step, self.rank


class Manifest(BaseModel):
    """What a committed checkpoint is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    term: int
    meta: Meta
    config: dict[str, Any]
    """The resolved config."""
    files: dict[str, dict[str, Any]]
    """Every file of its own: name -> ``size_bytes`` and ``digest``, for data files over the digests of header and blocks."""
    refers: tuple[str, ...] = ()
    """Files of older checkpoints that hold pieces of this one, below ``checkpoints/``."""
    size_bytes: int = Field(ge=0)
    """Of all pieces."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        validate.check_files(self.files, self.refers)
        return self

    @property
    def name(self) -> str:
        """Of its own file."""
        return file_name(self.term, "manifest.json")

    @property
    def indexes(self) -> list[str]:
        return [name for name in self.files if name.endswith(".json")]

    @property
    def written_bytes(self) -> int:
        """Of its own files; less than ``size_bytes`` where pieces did not change."""
        return sum(file["size_bytes"] for file in self.files.values())


def newest_whole(found: Sequence[Snapshot]) -> list[Snapshot]:
    """The parts of the newest snapshot that has one of every rank, by rank; none where there is no such snapshot."""
    by_step: dict[tuple[int, int], dict[int, Snapshot]] = {}
    for snapshot in found:
        by_step.setdefault((snapshot.meta.step, snapshot.term), {})[snapshot.rank] = snapshot
    for _, parts in sorted(by_step.items(), reverse=True):
        if sorted(parts) == list(range(parts[min(parts)].meta.world_size)):
            return [parts[rank] for rank in sorted(parts)]
    return []


def file_of(key: tuple[int, int, int]) -> str:
    """What a snapshot is called among pieces."""
    term, step, rank = key
    return f"{term}-{step}-{rank}"


def name_of(step: int) -> str:
    """The folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def file_name(term: int, what: str) -> str:
    """Files of different leases have different names, so that two writers cannot mix."""
    return f"a{term:04d}-{what}"


def term_of(file: str) -> int | None:
    """The lease that wrote a file; None for a marker."""
    found = re.match(r"a(\d{4,})-", file)
    return int(found[1]) if found else None


def data_name(term: int, rank: int) -> str:
    """The file of the tensors that a rank wrote."""
    return file_name(term, f"r{rank:04d}.safetensors")


def index_name(term: int, rank: int) -> str:
    """The file that says where in it they lie."""
    return file_name(term, f"r{rank:04d}.json")


def checkpoints(run: Folder) -> Folder:
    """The folder that holds a run's checkpoints."""
    return run / "checkpoints"


def listed(run: Folder) -> dict[str, set[str]]:
    """Names of all checkpoints, whatever their state, oldest first -> the names of their files."""
    found: dict[str, set[str]] = {}
    for path in checkpoints(run).files():
        name, _, file = path.partition("/")
        if step_of(name) is not None and file:
            found.setdefault(name, set()).add(file)
    return found


def is_good(files: set[str]) -> bool:
    """Whether a checkpoint with these files counts."""
    return COMMITTED in files and not files & {ABANDONED, QUARANTINED}


def committed(run: Folder) -> list[str]:
    """Names of the committed checkpoints that are neither abandoned nor in quarantine, oldest first."""
    return [name for name, files in listed(run).items() if is_good(files)]


def read_manifest(run: Folder, name: str) -> Manifest:
    """The manifest that the commit marker names; CheckpointError when its bytes are others than were committed, OtherFormat
    when they are of another version of this package, OSError when it cannot be read."""
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
                f"{name} of {run.url} is in format {written}, this version of springtide reads {FORMAT}: use the version that "
                "wrote it, or a new run.id"
            )
        manifest = Manifest.model_validate_json(data)
        if manifest.meta.step != step_of(name):
            raise ValueError(f"it is of step {manifest.meta.step}")
        return manifest
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadFile(f"{name}: a file is missing: {error}", marked) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # no JSON, or not what this version writes
        raise BadFile(f"{name}: manifest or commit marker cannot be understood: {error}", marked) from None


def read_index(folder: Folder, name: str, expected: str = "") -> tuple[dict[str, Any], list[Piece]]:
    """The index ``name`` of one rank: facts of its data file, and its pieces. BadFile when it is not ``expected``."""
    file = f"{folder.name}/{name}"
    try:
        data = folder.read(name)
    except (FileNotFoundError, IsADirectoryError):
        raise BadFile(f"{name}: a file is missing: {file}", file) from None
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
    """Of a data file: over the digests of its header and of the blocks that lie in it, in order."""
    return digest.of_bytes("".join([header_digest, *(one for piece in pieces for one in piece.digests)]).encode())


def quarantine(run: Folder, name: str, reason: str, term: int = 0) -> None:
    """Take a checkpoint out of those that count. Its files stay until retention passes it, for whoever wants to look.
    ``term``: who says so."""
    _mark(run, name, QUARANTINED, reason, term)


def abandon(run: Folder, names: Iterable[str], reason: str, term: int = 0) -> None:
    """Take checkpoints that the run does not go on from out of those that count; likewise."""
    for name in names:
        _mark(run, name, ABANDONED, reason, term)


def _mark(run: Folder, name: str, mark: str, reason: str, term: int) -> None:
    note = {"reason": reason, "time_s": time.time(), "term": term}
    checkpoints(run).write(f"{name}/{mark}", json.dumps(note))


def marked_by(run: Folder, name: str, mark: str) -> int:
    """The lease that marked a checkpoint; 0 where the mark does not say."""
    try:
        return int(checkpoints(run).read_json(f"{name}/{mark}")["term"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def of_another_order(run: Folder, meta: Meta, identity: Identity) -> str:
    """Why a checkpoint is none of this run's order; empty when it is."""
    wanted = identity(meta.step)
    if meta.order_identity == wanted:
        return ""
    return (
        f"checkpoint {name_of(meta.step)} of {run.url} was trained in the order {meta.order_identity}, this run's is "
        f"{wanted}: another dataset, seed, batch, lanes or window, or other weights or skips of steps that are done; "
        "use those it was trained with, or a new run.id"
    )


def check_order(run: Folder, identity: Identity, go_back: bool, term: int = 0) -> bool:
    """CheckpointError when the newest checkpoint is none of this run's order. With ``go_back`` the run goes on from the
    newest that is, and those after it are marked as abandoned by ``term``, which loses no byte of them. Returns whether
    any checkpoint is of this order, or there is none at all; where that is False nothing is marked."""
    others: list[str] = []
    for name in reversed(committed(run)):
        try:
            meta = read_manifest(run, name).meta
        except CheckpointError:
            continue  # whoever restores will put it in quarantine
        problem = of_another_order(run, meta, identity)
        if not problem:
            abandon(run, others, "the run went on from an older one in another order", term)
            return True
        if not go_back:
            raise CheckpointError(
                f"{problem}, or say --accept-changes to go on from the newest checkpoint of this order"
            )
        others.append(name)
    return not others


def check(name: str, data: bytes | memoryview, expected: str) -> None:
    """CheckpointError when ``data`` has not the digest ``expected``."""
    check_digest(name, digest.of_bytes(data), expected)


def check_digest(name: str, found: str, expected: str) -> None:
    """CheckpointError when the digest ``found`` is not ``expected``."""
    if found != expected:
        raise CheckpointError(f"{name}: digest expected {expected}, found {found}")
