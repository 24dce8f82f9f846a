"""A checkpoint from elsewhere: what its manifest and indexes say is read strictly, and reaches no file outside."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import (
    ABANDONED,
    COMMITTED,
    FORMAT,
    QUARANTINED,
    Meta,
    OtherFormat,
    Piece,
    StagedPiece,
    checkpoints,
    marked_by,
    read_index,
    read_manifest,
)
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.load import read_into
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.second_reader import still_bad
from springtide.errors import CheckpointError
from springtide.storage import Folder, digest

NAME = "step-0000000005"
DATA = bytes(range(96))


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    """A run with one checkpoint of two tensors."""
    folder = Folder(tmp_path / "run")
    number = leases.claim(folder, "me").term
    meta = Meta(step=5, tokens=5, world_size=1, order_identity="o", config_fingerprint="c", tokenizer_digest="f" * 32)
    pieces = [
        StagedPiece("model/a", "F32", (4, 4), (0, 0), (4, 4), 0, 64),
        StagedPiece("model/b", "BF16", (16,), (0,), (16,), 64, 32),
    ]
    job = CommitJob(folder.url, number, 0, meta, {}, pieces, Rule(3))
    PieceWriter(folder).write(job, lambda staged: memoryview(DATA)[staged.begin :][: staged.size_bytes], lambda: False)
    return folder


def changed(run: Folder, file: str, change: Any) -> None:
    """Have ``file`` say something else, with every digest of it as it should be."""
    folder = checkpoints(run) / NAME
    marker = folder.read_json(COMMITTED)
    manifest = folder.read_json(marker["manifest"])
    if file == "index":
        [name] = [name for name in manifest["files"] if name.endswith(".json")]
        data = change(folder.read_json(name))
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        folder.write(name, data)
        manifest["files"][name] = {"size_bytes": len(data), "digest": digest.of_bytes(data)}
    data = change(manifest) if file == "manifest" else manifest
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    folder.write(marker["manifest"], data)
    marker |= {"digest": digest.of_bytes(data)}
    marker = change(marker) if file == "marker" else marker
    folder.write(COMMITTED, marker if isinstance(marker, bytes) else json.dumps(marker))


def test_what_was_written_is_read(run: Folder) -> None:
    manifest = read_manifest(run, NAME)
    assert manifest.meta.tokenizer_digest == "f" * 32
    [name] = manifest.indexes
    _, pieces = read_index(checkpoints(run) / NAME, name, manifest.files[name]["digest"])
    assert [(piece.tensor, piece.size_bytes) for piece in pieces] == [("model/a", 64), ("model/b", 32)]
    [found] = inspect(run, verify=True)
    assert found.state == "committed"


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("marker", lambda marker: marker | {"manifest": "../../../secret.json"}),
        ("marker", lambda marker: marker | {"manifest": "/etc/passwd"}),
        ("marker", lambda marker: marker | {"manifest": None}),
        ("marker", lambda marker: [marker]),
        ("marker", lambda marker: DEEP),
        ("manifest", lambda manifest: DEEP),
        ("manifest", lambda manifest: [manifest]),
        (
            "manifest",
            lambda manifest: manifest | {"files": {"../../a0001-r0000.json": {"size_bytes": 1, "digest": "0" * 32}}},
        ),
        ("manifest", lambda manifest: manifest | {"files": {"/dev/zero": {"size_bytes": 1, "digest": "0" * 32}}}),
        ("manifest", lambda manifest: manifest | {"files": {"a0001-r0000.json": {"size_bytes": 1}}}),
        (
            "manifest",
            lambda manifest: manifest | {"files": {"a0001-r0000.json": {"size_bytes": -1, "digest": "0" * 32}}},
        ),
        ("manifest", lambda manifest: manifest | {"refers": ["../../../x.safetensors"]}),
        ("manifest", lambda manifest: manifest | {"refers": ["step-0000000001/COMMITTED"]}),
        ("manifest", lambda manifest: manifest | {"size_bytes": -1}),
        ("manifest", lambda manifest: manifest | {"meta": manifest["meta"] | {"step": 6}}),
        ("manifest", lambda manifest: manifest | {"meta": manifest["meta"] | {"tokenizer_digest": "../x"}}),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_no_checkpoint(run: Folder, file: str, change: Any) -> None:
    changed(run, file, change)
    with pytest.raises(CheckpointError, match=NAME):
        read_manifest(run, NAME)
    [found] = inspect(run, verify=True)
    assert found.state == "bad"


def piece(**changes: Any) -> Any:
    """Changes the first piece of an index."""
    fields = ["tensor", "dtype", "shape", "offsets", "sizes", "file", "begin", "size_bytes", "digests"]

    def change(index: dict[str, Any]) -> dict[str, Any]:
        for field, value in changes.items():
            index["pieces"][0][fields.index(field)] = value
        return index

    return change


@pytest.mark.parametrize(
    "change",
    [
        piece(file="../../../victim/secret"),
        piece(file="/dev/zero"),
        piece(file=f"{NAME}/../../x/a0001-r0000.safetensors"),
        piece(file=f"{NAME}/a0001-r0000.safetensors\n"),
        piece(file=5),
        piece(begin=-4),
        piece(begin=2**63),
        piece(begin=1.5),
        piece(size_bytes=32),  # shorter than its box: the rest would keep what was in memory
        piece(sizes=[4, 5]),
        piece(offsets=[1, 0]),
        piece(offsets=[0]),
        piece(sizes=[-4, -4]),
        piece(dtype="F128"),
        piece(digests=[]),
        piece(digests=["0" * 32] * 2),
        piece(digests=None),
        piece(tensor=None),
        lambda index: index | {"pieces": [[]]},
        lambda index: index | {"pieces": None},
        lambda index: {"size_bytes": 0},
        lambda index: index | {"size_bytes": "1"},
        lambda index: index | {"header_bytes": -1},
        lambda index: [index],
        lambda index: DEEP,
    ],
)
def test_an_index_that_says_what_cannot_be_is_no_checkpoint(run: Folder, change: Any) -> None:
    changed(run, "index", change)
    manifest = read_manifest(run, NAME)
    [name] = manifest.indexes
    with pytest.raises(CheckpointError, match=rf"{name}: .*cannot be"):
        read_index(checkpoints(run) / NAME, name, manifest.files[name]["digest"])
    [found] = inspect(run, verify=True)
    assert found.state == "bad"


def test_a_checkpoint_of_another_format_is_refused_by_number(run: Folder) -> None:
    changed(run, "manifest", lambda manifest: manifest | {"format": 2, "old": True})
    with pytest.raises(CheckpointError, match=f"format 2.*reads {FORMAT}"):
        read_manifest(run, NAME)


@pytest.mark.parametrize("which", ["manifest.json", "r0000.json", "r0000.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_no_checkpoint(run: Folder, which: str) -> None:
    [name] = [name for name in (checkpoints(run) / NAME).names() if name.endswith(which)]
    (checkpoints(run) / NAME).remove(name)
    Path(checkpoints(run).where(f"{NAME}/{name}")).mkdir()
    [found] = inspect(run, verify=True)
    assert found.state == "bad"


def test_a_manifest_with_a_key_of_another_version_is_no_damage(run: Folder) -> None:
    """Its bytes are those that were committed: a quarantine would take a good checkpoint away."""
    for key in ("manifest", "meta"):
        changed(
            run,
            "manifest",
            lambda one, key=key: one | {"new": 1} if key == "manifest" else one | {key: one[key] | {"new": 1}},
        )
        with pytest.raises(OtherFormat, match=rf"{NAME} of .* (meta\.)?new\b"):
            read_manifest(run, NAME)


@pytest.mark.parametrize("mark", [QUARANTINED, ABANDONED])
@pytest.mark.parametrize(
    "note", [b"", b"[]", b'{"reason": 5, "term": []}', b'{"term": Infinity, "reason": ""}', b"5", None]
)
def test_a_damaged_mark_still_marks(run: Folder, mark: str, note: bytes | None) -> None:
    path = Path(checkpoints(run).where(f"{NAME}/{mark}"))
    path.write_bytes(note) if note is not None else path.mkdir()
    if note is None:
        (path / "file").touch()
        assert marked_by(run, NAME, mark) == 0
        return
    assert marked_by(run, NAME, mark) == 0
    [found] = inspect(run)
    assert found.state == mark.lower()
    assert found.reason.startswith("its note cannot be read (")


PIECE = ("model/a", "F32", (4, 4))


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),  # rows 0 to 2; the sizes add up, row 3 is in none
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], "4 elements are in no file"),
    ],
)
def test_pieces_that_are_not_the_whole_tensor_are_refused(tmp_path: Path, boxes: Any, problem: str) -> None:
    folder, pieces = Folder(tmp_path), []
    data = np.arange(16, dtype=np.float32).tobytes()
    file = f"{NAME}/a0001-r0000.safetensors"
    folder.write(file, data)
    for offsets, sizes in boxes:
        size = 4 * math.prod(sizes)
        pieces.append(Piece(*PIECE, offsets, sizes, file, 0, size, (digest.of_bytes(data[:size]),)))
    target = torch.full((4, 4), -1.0)
    with pytest.raises(CheckpointError, match=rf"model/a: .*{problem}"):
        read_into(folder, pieces, {"model/a": target})
    assert (target == -1).all()


def test_pieces_of_one_tensor_that_differ_in_shape_are_refused(tmp_path: Path) -> None:
    piece = Piece(*PIECE, (0, 0), (2, 4), f"{NAME}/a0001-r0000.safetensors", 0, 32, ("0" * 32,))
    for other in (piece._replace(shape=(8,), offsets=(0,), sizes=(8,)), piece._replace(dtype="F64")):
        with pytest.raises(CheckpointError, match=r"model/a: .*pieces"):
            read_into(Folder(tmp_path), [piece, other], {"model/a": torch.zeros(4, 4)})


def test_a_header_of_any_size_takes_no_memory(run: Folder) -> None:
    changed(run, "index", lambda index: index | {"header_bytes": 2**50})
    [found] = inspect(run, verify=True)
    assert found.state == "bad"
    assert "header: digest expected" in found.reason


def test_the_second_reader_finds_a_folder_instead_of_a_file_bad(run: Folder) -> None:
    """The second reader finds a folder in the place of a file bad."""
    [name] = [name for name in (checkpoints(run) / NAME).names() if name.endswith(".safetensors")]
    (checkpoints(run) / NAME).remove(name)
    Path(checkpoints(run).where(f"{NAME}/{name}")).mkdir()
    assert "is a folder" in still_bad(run, NAME, f"{NAME}/{name}")
