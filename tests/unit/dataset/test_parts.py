"""A unit becomes parts of bounded memory, and the dataset does not depend on where they are cut."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from prepared import contents, prepare, small, write_corpus

from springtide.dataset import parts
from springtide.storage import Folder

pytestmark = pytest.mark.processes

TEXT_MIB = 6
_MEASURE = """
import resource, sys
from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import open_source, open_tokenizer
from springtide.dataset import parts
from springtide.shards import TOKENIZER
from springtide.storage import Folder

source, work, parts._PART_BYTES = open_source(sys.argv[1]), Folder(sys.argv[2]), 2**19
work.write(TOKENIZER, open_tokenizer("bytes", (), 0).to_json())
corpus = CorpusConfig(tokenizer="bytes", near_duplicates=False)

def peak_mib(path):
    [unit] = open_source(path).units()
    parts.make_part(parts.PartJob(0, open_source(path), corpus, unit, "", ShardsConfig(), work))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

small = peak_mib(sys.argv[1])
work.remove("parts")
print(small, peak_mib(sys.argv[3]))
"""


def _write(file: Path, mib: int) -> None:
    line = json.dumps({"text": "It was a dark and stormy night. " * 256}).encode() + b"\n"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for number in range(mib * 2**20 // len(line)):
            out.write(line.replace(b"dark", b"%04d" % number))


def test_a_compressed_file_takes_the_memory_of_a_part(tmp_path: Path) -> None:
    _write(tmp_path / "small.jsonl.gz", 1)
    _write(tmp_path / "large.jsonl.gz", TEXT_MIB)
    command = [str(tmp_path / "small.jsonl.gz"), str(tmp_path / "work"), str(tmp_path / "large.jsonl.gz")]
    env = {**os.environ, "MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command], capture_output=True, text=True, check=True, env=env
    )
    small_mib, large_mib = map(float, done.stdout.split())
    assert len(list((tmp_path / "work" / "parts").glob("*.columns"))) > TEXT_MIB // 2
    assert large_mib - small_mib < TEXT_MIB * 2  # whole, the texts and their ids would take seven times the text


def test_the_dataset_does_not_depend_on_where_parts_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_corpus(tmp_path / "files", 120)
    (tmp_path / "corpus").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    whole = prepare(small(tmp_path / "whole", tmp_path / "corpus"))
    written: list[str] = []
    put = Folder.put

    def noted(self: Folder, name: str, parts: Sequence[memoryview], private: bool = False) -> None:
        written.append(name)
        put(self, name, parts, private)

    monkeypatch.setattr(Folder, "put", noted)
    monkeypatch.setattr(parts, "_PART_BYTES", 20_000)
    cut = prepare(small(tmp_path / "cut", tmp_path / "corpus"))
    assert sum(name.startswith("parts/000000-") for name in written) > 4
    assert contents(cut.shards.dataset) == contents(whole.shards.dataset)
