"""Labels: a model's log-probabilities for the tokens of a dataset. They are stored in a separate folder, with the same rows in
the same row groups (Parquet's units of rows) as the dataset.

    labels.json                     written last: the dataset's digest, the labelling model, the digest of each file
    train-00000-g0000.safetensors   the labels of one row group, read in place

A row has L positions. Position j predicts token j + 1.

    topk      ids (rows, L, k), the k most likely next tokens, the likeliest first; their logprobs fp16 (rows, L, k)
    logprob   logprobs fp32 (rows, L) of the actual next tokens

Log-probabilities of ``topk`` are fp16, which makes the files a quarter to a third smaller. Rounding changes a log-probability
by at most 1/2048 of its value: a probability of 1% changes by 0.2% of itself. Log-probabilities of ``logprob`` are fp32,
because objectives add up hundreds of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import model_validator

from springtide.errors import CorpusError, explain
from springtide.shards.manifest import Manifest, Split
from springtide.shards.ranges import ByteRange, CheckedRanges, OpenGroups
from springtide.shards.shard_table import Count, Digest, Record
from springtide.storage import Cache, Folder, to_json

LABELS = "labels.json"
FORMAT = 1
Columns = dict[str, np.ndarray]
"""Name of a column, such as ``logprobs`` -> its values, (rows, L) or (rows, L, k). L: sequence length."""
_SAMPLE_IDS = "sample_ids"
_TYPES = {"int64": "I64", "float16": "F16", "float32": "F32", "uint8": "U8", "uint16": "U16", "uint32": "U32"}
"""NumPy name of a type -> its name in safetensors."""
_REMEDY = "remove the labels' folder and run `springtide data prepare --label-by` again, or restore the file"


class Labels(Record):
    """The manifest of labels: which model computed them for which dataset, and the digests of all files."""

    format: int = FORMAT
    dataset: Digest
    """Digest of the manifest of the labelled dataset."""
    what: Literal["topk", "logprob"]
    k: Count
    """Number of most likely next tokens at each position, for topk; 0 for logprob."""
    id_type: Literal["uint8", "uint16", "uint32"]
    """Type of ids, the smallest that fits the vocabulary."""
    sequence_length: Count
    labeller: dict[str, str | int]
    """The model that computed the labels: its run or folder, checkpoint and step, and the digest of its weights."""
    groups: dict[str, tuple[Digest, ...]]
    """Name of a shard of the dataset -> digests of its label files, one per row group."""

    @model_validator(mode="after")
    def _check(self) -> Labels:
        if (self.k > 0) != (self.what == "topk"):
            raise ValueError(f"k = {self.k} with what = {self.what}: k must be positive for topk, and 0 for logprob")
        return self

    @property
    def digest(self) -> str:
        """Hash over all fields, 32 hex digits. A run that trains on these labels includes it in the hash that identifies its
        data."""
        text = to_json(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def row_bytes(self) -> int:
        """Size of a row's labels [bytes]."""
        return self.layout.size_bytes(1)

    @property
    def layout(self) -> LabelLayout:
        """Names, types and shapes of the columns."""
        return LabelLayout(self.what, self.k, self.id_type, self.sequence_length)


class LabelLayout(NamedTuple):
    """The columns of labels, and their places in a safetensors file."""

    what: str
    k: int
    id_type: str
    sequence_length: int

    def columns(self, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name of a column -> its type and shape, in the order in which the file stores the columns."""
        if self.what == "logprob":
            return {"logprobs": ("float32", (rows, self.sequence_length))}
        shape = (rows, self.sequence_length, self.k)
        return {"logprobs": ("float16", shape), "ids": (self.id_type, shape)}

    def _stored(self, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {_SAMPLE_IDS: ("int64", (rows,)), **self.columns(rows)}

    def size_bytes(self, rows: int) -> int:
        """Return the size of a label file with ``rows`` rows, without its header [bytes]."""
        return sum(_size(kind, shape) for kind, shape in self._stored(rows).values())

    def header(self, rows: int) -> bytes:
        """Return the header of a safetensors file with ``rows`` rows, including the length in front of it."""
        found, begin = {}, 0
        for name, (kind, shape) in self._stored(rows).items():
            end = begin + _size(kind, shape)
            found[name] = {"dtype": _TYPES[kind], "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * (-len(text) % 8)  # align the values after the header to 8 bytes
        return len(text).to_bytes(8, "little") + text

    def encode(self, sample_ids: np.ndarray, columns: Mapping[str, np.ndarray]) -> list[memoryview]:
        """Return the bytes of a row group's file, in parts because the file may be large. ``sample_ids``: int64 (rows,), as
        stored with the tokens of the row group."""
        parts, given = [memoryview(self.header(len(sample_ids)))], {_SAMPLE_IDS: sample_ids, **columns}
        for name, (kind, shape) in self._stored(len(sample_ids)).items():
            assert (given[name].dtype, given[name].shape) == (np.dtype(kind), shape), name
            values = np.ascontiguousarray(given[name], np.dtype(kind).newbyteorder("<"))
            parts.append(values.reshape(-1).view(np.uint8).data)
        return parts

    def decode(self, data: np.ndarray, rows: int) -> Columns:
        """Return the columns of a file, ``sample_ids`` included, as views of its bytes ``data``, without a copy."""
        begin, found = len(self.header(rows)), {}
        for name, (kind, shape) in self._stored(rows).items():
            end = begin + _size(kind, shape)
            found[name] = np.frombuffer(data[begin:end], np.dtype(kind).newbyteorder("<")).reshape(shape)
            begin = end
        return found


def _size(kind: str, shape: tuple[int, ...]) -> int:
    size = np.dtype(kind).itemsize
    for length in shape:  # Python integers: numpy's product overflows for the huge shapes of a hostile manifest
        size *= length
    return size


def id_type(vocab_size: int) -> str:
    """Return the smallest type that fits the ids of a vocabulary."""
    return next(kind for kind in ("uint8", "uint16", "uint32") if vocab_size <= 2 ** np.iinfo(kind).bits)


def label_file(shard: str, group: int) -> str:
    """Return the name of the file with the labels of a row group."""
    return f"{shard.removesuffix('.parquet')}-g{group:04d}.safetensors"


class _LabelFile(NamedTuple):
    name: str
    size_bytes: int
    digest: str


class _View:
    """The labels of one row group, as views of its file's bytes."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.num_data_bytes = sum(column.nbytes for column in columns.values())


class LabelReader:
    """Random access to the labels of the rows of a split."""

    def __init__(self, folder: Folder, labels: Labels, split: Split, cache: Cache | None = None) -> None:
        """``split``: split (training or held-out rows) of the dataset, or of one of its sources; ``cache``: this node's disk
        cache for object storage, or None."""
        self.layout = labels.layout
        rows, ranges = split.group_rows().tolist(), []
        for shard in split.shards:
            for index, (group, digest) in enumerate(zip(shard.groups, labels.groups[shard.name], strict=True)):
                size = len(self.layout.header(group.rows)) + self.layout.size_bytes(group.rows)
                file = _LabelFile(label_file(shard.name, index), size, digest)
                ranges.append(ByteRange(file, 0, size, digest, "labels"))
        checked = CheckedRanges(folder, ranges.__getitem__, cache, _REMEDY)
        self._groups = OpenGroups(
            checked, np.cumsum(rows, dtype=np.int64), lambda number, data: _View(self.layout.decode(data, rows[number]))
        )

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, Columns]:
        """Return the sample ids, int64 (n,), and the labels of the rows with numbers ``rows``, int64 (n,), in that order.
        Raises CorruptShard, which names the file, if bytes have changed."""
        sample_ids = np.empty(len(rows), dtype=np.int64)
        found = {name: np.empty(shape, kind) for name, (kind, shape) in self.layout.columns(len(rows)).items()}
        for group, here, index in self._groups.of(rows):
            sample_ids[here] = group.columns[_SAMPLE_IDS].take(index)
            for name, column in found.items():
                column[here] = group.columns[name].take(index, axis=0)
        return sample_ids, found


def write_labels(folder: Folder, labels: Labels) -> None:
    """Write the manifest of labels, with its digest."""
    folder.write_json(LABELS, {**labels.model_dump(mode="json"), "digest": labels.digest})


def load_labels(folder: Folder) -> Labels:
    """Load the manifest of sealed (complete) labels. Raises CorpusError if it is missing, damaged or of another format."""
    try:
        record: Any = folder.read_json(LABELS)
        if isinstance(record, dict) and record.get("format") != FORMAT:
            limit = f"are in format {record.get('format')!r:.40}, this version of springtide reads {FORMAT}"
            remedy = "write them again, with `springtide data prepare --label-by`"
            raise CorpusError(explain("labels", folder.url, limit, remedy))
        sealed = record.pop("digest", None) if isinstance(record, dict) else None
        labels = Labels.model_validate(record)
        if labels.digest != sealed:
            raise ValueError(f"digest expected {sealed!r:.40}, found {labels.digest}")
        return labels
    except CorpusError:
        raise
    except FileNotFoundError:
        remedy = "write them with `springtide data prepare --label-by`; a labelling that was killed resumes"
        raise CorpusError(explain("labels", folder.url, "holds no sealed labels", remedy)) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or not a valid manifest
        problem = f"has a {LABELS} that cannot be read ({error})"
        raise CorpusError(explain("labels", folder.url, problem, "write them again")) from None


def check_labels(labels: Labels, url: str, manifest: Manifest, dataset: str) -> None:
    """Raise CorpusError if labels do not belong to this dataset. ``url``: URL of the labels; ``dataset``: URL of the
    dataset."""
    if labels.dataset != manifest.digest:
        problem = f"are labels of another dataset, {labels.dataset}: {dataset} is {manifest.digest}"
        raise CorpusError(
            explain("labels", url, problem, "label this dataset, or set shards.dataset to the labelled dataset")
        )
    shards = {shard.name: len(shard.groups) for split in manifest.splits.values() for shard in split.shards}
    same = labels.sequence_length == manifest.sequence_length and labels.k <= manifest.vocab_size
    if not same or labels.id_type != id_type(manifest.vocab_size):
        raise CorpusError(explain("labels", url, "do not fit the rows of their dataset", "write them again"))
    if {name: len(digests) for name, digests in labels.groups.items()} != shards:
        raise CorpusError(explain("labels", url, "lack row groups of their dataset", "write them again"))
