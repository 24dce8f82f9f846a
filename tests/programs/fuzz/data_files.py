"""Targets: datasets and corpora."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import token_files
from prepared import SEALED, prepare

from fuzz.mutations import PLACES, zst
from fuzz.target import Target, must
from springtide import config as configs
from springtide.cli.inspect import show_dataset
from springtide.corpus import Broken, Document, open_source
from springtide.corpus.tokenizer import open_tokenizer
from springtide.dataset import open_dataset, rows_text
from springtide.shards import (
    LABELS,
    MANIFEST,
    ROW_GROUPS,
    TOKENIZER,
    LabelLayout,
    LabelReader,
    Labels,
    Manifest,
    Shard,
    Split,
    SplitReader,
    check_labels,
    label_file,
    load_labels,
    write_labels,
)
from springtide.shards.shard_table import RowGroup
from springtide.storage import Folder, digest
from springtide.stream import open_data

TEXT = [f"Line {number}: sing the sea, fear the fog.\n" for number in range(300)]


class Datasets(Target):
    """A small sealed dataset."""

    name = "dataset"
    share = 4

    def make(self) -> None:
        source = self.root.parent / "dataset-source"
        source.mkdir(exist_ok=True)
        for part in range(6):
            (source / f"{part}.txt").write_text(f"Part {part}\n" + "".join(TEXT[part * 50 :][:50]))
        changes = {
            "shards.root": str(self.root.parent / "made"),
            "corpus.source": str(source),
            "shards.rows_per_group": 8,
            "shards.groups_per_shard": 2,
            "shards.heldout_fraction": 0.3,
        }
        self.config = prepare(configs.recipes.tiny().override(changes))
        Folder(self.config.shards.dataset)
        import shutil

        shutil.copytree(self.config.shards.dataset, self.root)
        self.rows = self._rows()

    def kinds(self) -> Mapping[str, str]:
        shards = self.of(".parquet")
        return {MANIFEST: "json", ROW_GROUPS: "bytes", TOKENIZER: "json"} | dict.fromkeys(shards, "parquet")

    def names(self) -> tuple[str, ...]:
        return (*super().names(), str(self.root)) if self.changed == MANIFEST else super().names()

    def _rows(self) -> list[np.ndarray]:
        manifest, vocabulary = open_dataset(str(self.root))
        found: list[np.ndarray] = []
        for name in sorted(manifest.splits):
            reader = SplitReader(Folder(self.root), manifest, name)
            found += reader.read(np.arange(manifest.splits[name].rows))
            list(rows_text(found[-1][:2], vocabulary))
        return found

    def read(self, random: Random) -> None:
        url = str(self.root)
        with contextlib.redirect_stdout(io.StringIO()):
            show_dataset(url, random.random() < 0.5, random.random() < 0.3)
        rows = self._rows()
        data = open_data(self.config.override({"shards.dataset": url}).data)
        _, tokens = data.rows(data.order.batch(data.order.step_after(0)))
        must(tokens.shape[1] == 65, "rows of another length")
        same = len(rows) == len(self.rows) and all(map(np.array_equal, rows, self.rows))
        must(same, "SILENT CORRUPTION: other rows than were sealed")


class LabelFiles(Target):
    """Labels of a dataset."""

    name = "labels"

    def make(self) -> None:
        shard = {"name": "train-00000.parquet", "rows": 12, "size_bytes": 2**20, "digest": "0" * 32}
        offsets = {"sample_ids": 0, "num_bytes": 96, "tokens": 144, "end": 144 + 12 * 2 * 9, "digest": "0" * 32}
        group = RowGroup.model_validate({"rows": 12, **offsets})
        counts = {"documents": 1, "tokens": 1, "num_bytes": 1, "rows": 12}
        split = Split.model_validate({**counts, "shards": (Shard.model_validate({**shard, "groups": (group,)}),)})
        facts = {
            "token_type": "uint16",
            "vocab_size": 300,
            "sequence_length": 8,
            "sources": {"corpus": {"heldout": split}},
        }
        self.manifest = Manifest.model_validate({**SEALED, **facts, "heldout_fraction": 1.0})
        layout, rng = LabelLayout("topk", 3, "uint16", 8), np.random.default_rng(0)
        self.ids = rng.integers(0, 300, (12, 8, 3)).astype(np.uint16)
        columns = {"ids": self.ids, "logprobs": -rng.random((12, 8, 3)).astype(np.float16)}
        data = b"".join(layout.encode(np.arange(12), columns))
        Folder(self.root).write(label_file("train-00000.parquet", 0), data)
        groups = {"train-00000.parquet": (digest.of_bytes(data),)}
        named = {"dataset": self.manifest.digest, "labeller": {"run": "teacher"}, "groups": groups}
        write_labels(Folder(self.root), Labels.model_validate({**named, **layout._asdict()}))

    def kinds(self) -> Mapping[str, str]:
        return {LABELS: "json"} | dict.fromkeys(self.of(".safetensors"), "bytes")

    def names(self) -> tuple[str, ...]:
        return (*super().names(), str(self.root)) if self.changed == LABELS else super().names()

    def sign(self, random: Random) -> None:
        if self.changed == LABELS and random.random() < 0.7:
            with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
                record = json.loads((self.root / LABELS).read_bytes())
                record.pop("digest", None)
                write_labels(Folder(self.root), Labels.model_validate(record))

    def read(self, random: Random) -> None:
        folder = Folder(self.root)
        labels = load_labels(folder)
        check_labels(labels, str(self.root), self.manifest, "the dataset")
        _, columns = LabelReader(folder, labels, self.manifest.splits["heldout"]).read(np.arange(12))
        same = "ids" in columns and np.array_equal(columns["ids"], self.ids)
        must(same, "SILENT CORRUPTION: other labels than were sealed")


class Corpora(Target):
    """Documents in every form that is read."""

    name = "corpus"
    share = 4
    places = tuple(one for one in PLACES if one != "sparse")  # a corpus of 64 GiB is read

    def make(self) -> None:
        self.root.mkdir()
        lines = b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in TEXT[:40])
        plain = "".join(TEXT[:40]).encode()
        (self.root / "a.txt").write_bytes(plain)
        (self.root / "b.jsonl").write_bytes(lines)
        (self.root / "c.jsonl.gz").write_bytes(gzip.compress(lines))
        (self.root / "d.jsonl.zst").write_bytes(zst(lines))
        (self.root / "e.jsonl.bz2").write_bytes(bz2.compress(lines))
        (self.root / "f.txt.gz").write_bytes(gzip.compress(plain))
        (self.root / "g.txt.zst").write_bytes(zst(plain))
        (self.root / "j.json").write_bytes(json.dumps([json.loads(line) for line in lines.splitlines()]).encode())
        (self.root / "k.json").write_bytes(b"\n".join(lines.splitlines()[:9]))
        (self.root / "l.csv").write_text(
            "id,text\n" + "".join(f'{one},"{text}"\n' for one, text in enumerate(TEXT[:40]))
        )
        (self.root / "m.tsv").write_text("text\tid\n" + "".join(f"a text\t{one}\n" for one in range(40)))
        (self.root / "n.jsonl.xz").write_bytes(lzma.compress(lines))
        self._write_arrow(self.root / "o.arrow", pa.ipc.new_stream)
        self._write_arrow(self.root / "p.arrow", pa.ipc.new_file)
        with tarfile.open(self.root / "q.tar", "w") as archive:
            for number, text in enumerate(TEXT[:20]):
                for end, data in (("txt", text.encode()), ("json", b'{"text": "metadata"}'), ("jpg", bytes(600))):
                    info = tarfile.TarInfo(f"{'folder/' * (number % 2 * 20)}{number:03d}.{end}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        (self.root / "r.tar.gz").write_bytes(gzip.compress((self.root / "q.tar").read_bytes()))
        (self.root / "saved").mkdir()
        self._write_arrow(self.root / "saved" / "data-00000-of-00001.arrow", pa.ipc.new_stream)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0", "_split": "train"}
        (self.root / "saved" / "state.json").write_text(json.dumps(state))
        for name, column in (("h", pa.array(TEXT)), ("i", pa.array(TEXT).dictionary_encode())):
            pq.write_table(pa.table({"text": column}), self.root / f"{name}.parquet", row_group_size=100)

    def _write_arrow(self, path: Path, opened: Callable[..., Any]) -> None:
        table = pa.table({"text": TEXT[:40], "more": [{"a": [number]} for number in range(40)]})
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=16)

    def kinds(self) -> Mapping[str, str]:
        ends = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz", "parquet": "parquet", "jsonl": "lines"}
        ends |= {"txt": "text", "json": "json", "csv": "text", "tsv": "text", "arrow": "bytes", "tar": "bytes"}
        ends["k.json"] = "lines"
        return {name: ends.get(name) or ends[name.rpartition(".")[2]] for name in self.before}

    def names(self) -> tuple[str, ...]:
        """A file that a list of files names may be called missing there, and a folder empty."""
        return (*super().names(), "state.json", "saved") if self.changed.startswith("saved") else super().names()

    def read(self, random: Random) -> None:
        is_saved = self.changed.startswith("saved")
        source = open_source(str(self.root / ("saved" if is_saved else self.changed)))
        source.fingerprint()
        units = source.units()
        left = 64 * 2**20  # characters: a stream of good documents is no violation, however long
        for one in itertools.islice((one for unit in units[:20] for one in source.read(unit)), 2000):
            must(is_saved or one.name.startswith(self.changed), f"a record of {one.name}")
            if isinstance(one, Document):
                assert one.digest
                left -= len(one.text)
                if left < 0:
                    return
            else:
                must(isinstance(one, Broken) and len(one.sample) <= 200, "a long sample")
                json.dumps(one._asdict())


class TokenFiles(Target):
    """Token ids in every layout that is read, each in a folder of its own."""

    name = "tokens"

    def make(self) -> None:
        self.vocabulary = open_tokenizer("bytes", (), 0)
        ids = [one[:-1] for one in self.vocabulary.encode(TEXT[:40])]
        folders = {one: self.root / one for one in ("megatron", "mds", "zstd", "litdata", "arrays", "records")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        token_files.megatron(folders["megatron"], ids)
        token_files.mds(folders["mds"], ids)
        token_files.mds(folders["zstd"], ids, "ndarray", "zstd")
        token_files.litdata(folders["litdata"], ids)
        array = token_files.array(ids, self.vocabulary.end_of_text)
        np.save(folders["arrays"] / "a.npy", array)
        array.tofile(folders["arrays"] / "b.bin")
        token_files.records(folders["records"], ids, "a.jsonl")

    def kinds(self) -> Mapping[str, str]:
        ends = {"zstd": "zstd", "jsonl": "lines", "json": "json"}
        return {name: ends.get(name.rpartition(".")[2], "bytes") for name in self.before}

    def names(self) -> tuple[str, ...]:
        """A data file that is short contradicts its index, which is named then."""
        folder = self.changed.partition("/")[0]
        others = {
            "megatron": ("a_text_document.idx",),
            "litdata": ("chunk-0-0.bin",),
            "records": (str(self.root / folder),),
        }
        return (*super().names(), "index.json", *others.get(folder, ()))

    def read(self, random: Random) -> None:
        source = open_source(str(self.root / self.changed.partition("/")[0]))
        source.fingerprint()
        records = (one for unit in source.units()[:20] for one in source.read(unit, self.vocabulary))
        for one in itertools.islice(records, 2000):
            if isinstance(one, Document):
                assert one.digest
                must(one.ids is None or int(one.ids.max(initial=0)) < self.vocabulary.size, "an id out of range")
            else:
                must(isinstance(one, Broken) and len(one.sample) <= 600, "a long sample")


class Vocabularies(Target):
    """A tokenizer's file that ``corpus.tokenizer`` names."""

    name = "tokenizer"

    def make(self) -> None:
        self.root.mkdir()
        (self.root / TOKENIZER).write_text(open_tokenizer("bpe", TEXT, 300).to_json())

    def kinds(self) -> Mapping[str, str]:
        return {TOKENIZER: "json"}

    def read(self, random: Random) -> None:
        vocabulary = open_tokenizer(str(self.root / TOKENIZER), (), 0)
        lengths = vocabulary.byte_lengths()
        must(len(lengths) == vocabulary.size, "another number of ids")
        [ids] = vocabulary.encode(["Sing the sea"])
        must(int(ids.max()) < vocabulary.size, "an id out of range")
        vocabulary.decode(ids.tolist())


TARGETS: tuple[type[Target], ...] = (Datasets, LabelFiles, Corpora, TokenFiles, Vocabularies)
