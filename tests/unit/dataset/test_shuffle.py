"""The shuffle in two passes: the same rows as ever, and requests and bytes that grow with the text and no faster."""

from __future__ import annotations

import collections
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import contents, prepare, small, write_corpus

from springtide.config import Config
from springtide.corpus import BANDS, open_source, sources
from springtide.dataset import make, open_dataset, plan_files, sealing, segments
from springtide.dataset.apart import read_bands
from springtide.dataset.columns import ColumnFile, Layout, in_order, sizes
from springtide.errors import DamagedFile
from springtide.shards import SplitReader
from springtide.storage import Folder

SAME_ROWS = {"concat": "b0ed5cae9b85733f770b0280327fbb59", "best_fit": "6f2c336e2a9667a5ec349e451622db5c"}
"""Digest of the rows and signatures that version 13 of preparing makes: of the code before the shuffle had two passes."""


def rows_digest(url: str) -> str:
    """Digest of all rows and signatures, which unlike that of the files does not depend on the version of pyarrow."""
    manifest, _ = open_dataset(url)
    state = hashlib.sha256()
    for name, split in manifest.splits.items():
        for column in SplitReader(Folder(url), manifest, name).read(np.arange(split.rows)):
            state.update(np.ascontiguousarray(column).tobytes())
        for shard in split.shards:
            state.update(np.ascontiguousarray(read_bands(Folder(url), shard)).tobytes())
    return state.hexdigest()[:32]


def of(packing: str, root: Path, text: Path, **changes: Any) -> Config:
    fitted = {"shards__packing": packing, "shards__mask_across_documents": True, "shards__sequence_length": 64}
    return small(root, text, corpus__tokenizer="bytes", **(fitted if packing == "best_fit" else {}), **changes)


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, segments and bundles of little text."""
    monkeypatch.setattr(sources, "_UNIT_BYTES", 4_000)
    monkeypatch.setattr(segments, "_SEGMENT_BYTES", 60_000)
    monkeypatch.setattr(plan_files, "_LEAST_BUNDLES", 4)
    monkeypatch.setattr(sealing, "_GAP_BYTES", 200)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("packing", SAME_ROWS)
def test_the_rows_are_those_of_the_code_before(tmp_path: Path, packing: str) -> None:
    write_corpus(tmp_path / "text", 160)
    assert rows_digest(prepare(of(packing, tmp_path / "data", tmp_path / "text")).shards.dataset) == SAME_ROWS[packing]


class Counted:
    """Requests and bytes of the stages after the text was read, by what they are for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        for name in ("read", "read_range", "open", "put", "exists", "size", "names"):
            monkeypatch.setattr(Folder, name, self._noted(name, getattr(Folder, name)))

    def _noted(self, how: str, of: Any) -> Any:
        def noted(folder: Folder, name: str = "", *arguments: Any) -> Any:
            found = of(folder, name, *arguments) if name or arguments else of(folder)
            kind = f"{how} {name.partition('/')[0]}"
            self.requests[kind] += 1
            if how in ("read", "read_range"):
                self.bytes[kind] += len(found)
            return found

        return noted


@pytest.mark.usefixtures("many_files")
def test_requests_and_bytes_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the text: a shard that looked into every part took sixteen times the requests."""
    requests, read, text = [], [], []
    for documents in (40, 160):
        text.append(sum(map(len, write_corpus(tmp_path / f"text-{documents}", documents))))
        with monkeypatch.context() as patch:
            counted = Counted(patch)
            prepare(of("concat", tmp_path / f"data-{documents}", tmp_path / f"text-{documents}"))
        requests.append(sum(many for kind, many in counted.requests.items() if not kind.startswith("open")))
        read.append(sum(counted.bytes.values()))
        assert counted.requests["names parts"] <= 1
        assert counted.bytes["read_range parts"] < 3 * text[-1]  # ids of two bytes, and 284 bytes a document
        assert counted.bytes["read_range segments"] < 3 * text[-1]
    growth = text[1] / text[0]
    assert requests[1] / requests[0] < growth * 1.2
    assert read[1] / read[0] < growth * 1.2


@pytest.mark.usefixtures("many_files")
def test_a_killed_plan_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text", 60)
    whole = prepare(of("concat", tmp_path / "whole", tmp_path / "text")).shards.dataset
    killed = of("concat", tmp_path / "killed", tmp_path / "text")
    sealed: list[int] = []

    def dies(job: sealing.SealJob) -> None:
        if len(sealed) == 2:
            raise KeyboardInterrupt
        sealed.append(job.number)
        sealing.seal_shards(job)

    with monkeypatch.context() as patch:
        patch.setattr(make, "seal_shards", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare(killed)
    ran: list[str] = []

    def noted(function: Any, jobs: Sequence[Any]) -> Iterator[Any]:
        for job in jobs:
            ran.append(function.__name__)
            yield function(job)

    monkeypatch.setattr(make, "make_plan", None)  # not called
    assert contents(prepare(killed, run=noted).shards.dataset) == contents(whole)
    assert set(ran) == {"seal_shards"}


def test_a_task_carries_its_own_unit_only(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    write_corpus(folder, 40)
    sizes_of_jobs = []
    for files in (50, 500):
        for number in range(files):
            (folder / f"more-{number:04d}.txt").write_text(f"a few words, {number}")
        config = small(tmp_path / "data", folder, corpus__tokenizer="bytes")
        reader = open_source(str(folder))
        apart = make.open_apart(config.corpus)
        jobs = make._part_jobs(config.corpus, config.shards, [reader], apart, {"": ""}, Folder(tmp_path / "work"))
        assert len({id(job.source) for job in jobs}) == 1  # which a tokenizer's sample groups them by
        sizes_of_jobs.append(len(pickle.dumps(jobs[0].source)))
    assert sizes_of_jobs[0] == sizes_of_jobs[1]


def test_files_are_looked_at_in_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path, 100)
    source = open_source(str(tmp_path))
    wanted = {name: source.folder.fs.info(source.folder.where(name)) for name in source.names}
    monkeypatch.setattr(type(source.folder.fs), "info", None)  # not called
    assert source.looks() == {name: f"{info['size']} {info['mtime']}" for name, info in wanted.items()}
    assert sum(unit.num_bytes for unit in source.units()) == sum(info["size"] for info in wanted.values())


def test_columns_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = []
    for number in range(3):
        lengths = rng.integers(1, 9, 20 * number).astype(np.int32)
        names = [f"{number}-{place}é".encode() for place in range(len(lengths))]
        files.append(
            {
                **{name: rng.integers(0, 5, len(lengths)).astype(np.uint64) for name in ("high", "low")},
                "share": rng.integers(0, 2**64, len(lengths), dtype=np.uint64),
                "length": lengths,
                "sketch": rng.integers(0, 256, (len(lengths), 128)).astype(np.uint8),
                "signature": rng.integers(0, 2**64, (len(lengths), BANDS), dtype=np.uint64),
                "tokens": rng.integers(0, 2**16, lengths.sum()).astype(np.uint16),
                "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
                "names": np.frombuffer(b"".join(names), np.uint8),
            }
        )
    merged = in_order(files, 0.25)
    file = ColumnFile(Folder(tmp_path), "one.columns", Layout(sizes(merged), "uint16", has_bands=True))
    file.write(merged)
    assert file.work.size(file.name) == file.layout.num_bytes
    for name, column in file.read_all().items():
        assert np.array_equal(column, merged[name]), name
    ends = np.cumsum(merged["length"])
    for row in (0, 1, 30, 59):
        place = file.name_of(row)
        number, _, at = place.rstrip("é").partition("-")
        begin = int(np.cumsum(files[int(number)]["length"])[int(at)])
        tokens = files[int(number)]["tokens"][begin - files[int(number)]["length"][int(at)] : begin]
        assert np.array_equal(file.read("tokens", int(ends[row] - merged["length"][row]), int(ends[row])), tokens)
        assert np.array_equal(file.read(f"band{row % BANDS}")[row], merged["signature"][row, row % BANDS])
    late = merged["share"] / 2.0**64 >= 0.25
    keys = list(zip(late.tolist(), merged["high"].tolist(), merged["low"].tolist(), strict=True))
    assert keys == sorted(keys)
    (tmp_path / "one.columns").write_bytes((tmp_path / "one.columns").read_bytes()[:-9])
    with pytest.raises(DamagedFile, match=r"one\.columns.* 9 bytes"):
        file.read_all()
