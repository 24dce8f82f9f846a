"""The manifest: the contents of a dataset and the digests of its bytes. It is written last, so a dataset with a manifest is
complete."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, model_validator

from springtide.config.data import SOURCE_NAME
from springtide.errors import CorpusError, explain
from springtide.shards.loss_mask import memory_type, most_ids
from springtide.shards.row_group_index import IndexRecord, SplitCounts, read_index_of, write_index
from springtide.shards.shard_table import Count, Digest, Record, Shard, ShardTable
from springtide.storage import Cache, Folder, to_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""File name of the chat template in a dataset's folder, the same as in Hugging Face model repositories."""
FORMAT = 10
"""Newest format of a manifest. Increase it when a reader of the previous format would misread or refuse the new one. A manifest
without ``whole_documents``, which format 10 added, is still written in format 9."""
_OF_CUT_DOCUMENTS = 9
_READ = (8, _OF_CUT_DOCUMENTS, FORMAT)
"""Formats that this version can read. In format 8 the manifest itself lists every row group. Before format 10, a document may
be cut into pieces in several rows."""
TRAIN, HELDOUT = "train", "heldout"


_COUNTS: TypeAdapter[dict[tuple[str, str], SplitCounts]] = TypeAdapter(dict[tuple[str, str], SplitCounts])
_SHARDS: TypeAdapter[tuple[Shard, ...]] = TypeAdapter(Annotated[tuple[Shard, ...], Field(min_length=1)])


def _table(shards: Any) -> ShardTable:
    return shards if isinstance(shards, ShardTable) else ShardTable.of(_SHARDS.validate_python(shards))


def _counts(table: ShardTable) -> dict[str, int]:
    return {"files": len(table), "row_groups": table.num_groups}


Shards = Annotated[ShardTable, PlainValidator(_table), PlainSerializer(_counts)]
"""The shards of a split. The manifest file has only the counts of shards and row groups; ``row_groups.bin`` has the rest."""


class Split(Record):
    """The training rows, or the held-out rows, of one source or of all sources together."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    documents: Count
    tokens: Count
    num_bytes: Count
    rows: Count
    shards: Shards

    def group_rows(self) -> np.ndarray:
        """Return the number of rows of each row group, in order over all shards, int32 or int64 (row groups,)."""
        return self.shards.group_rows()


class Manifest(Record):
    """The manifest of a sealed (complete, never changed) dataset."""

    format: int = FORMAT
    sequence_length: Count
    token_type: Literal["uint16", "uint32"]
    vocab_size: Count
    end_of_text: Count
    begin_of_text: Count
    """Id before a text. The text's first token is predicted from this id. Equal to ``end_of_text`` if one id both ends and
    begins documents."""
    mask_across_documents: bool = False
    """True if attention, positions and loss restart at each document of a row."""
    whole_documents: bool = False
    """True if no document is cut at the end of a row, as with chats. Then a document begins only at a ``begin_of_text`` that
    starts a row or follows an ``end_of_text``. If ``begin_of_text`` and ``end_of_text`` are the same id, it only separates
    documents: no token attends to it, and positions begin after it."""
    has_loss_mask: bool = False
    """True if some tokens are not predicted. The top bit of a stored id marks such a token (``shards/loss_mask.py``)."""
    tokenizer_digest: Digest
    """Digest of the file ``tokenizer.json``. All datasets of a mixture must have the same digest."""
    fingerprint: str
    """Fingerprint of the settings and the source text from which the dataset was prepared."""
    heldout_fraction: float = Field(gt=0, le=1, allow_inf_nan=False)
    """Share of the documents that is held out for evaluation: the documents with the smallest hashes of their text. 1 for a
    dataset without training text."""
    apart_from: tuple[Digest, ...] = ()
    """Digests of the manifests of other datasets against which this dataset was decontaminated (freed of shared text). This
    dataset does not train on text that they hold out, and they do not train on text that this dataset holds out."""
    source: dict[str, Any]
    """Facts about the source text: what was read, and what was dropped."""
    sources: dict[
        Annotated[str, Field(pattern=SOURCE_NAME)], dict[Annotated[str, Field(pattern="^(train|heldout)$")], Split]
    ]
    """Name of a source -> train or heldout -> the rows, numbered from 0. A row holds documents of one source. A small source
    may have no held-out rows."""
    row_groups: IndexRecord | None = None
    """Size and digest of the index, the file that lists the row groups. None in format 8, whose manifest lists the row groups
    itself, and until the index is written."""

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        for name, index in (("end_of_text", self.end_of_text), ("begin_of_text", self.begin_of_text)):
            if index >= self.vocab_size:
                raise ValueError(f"{name} = {index} is not one of the {self.vocab_size} ids")
        if self.vocab_size > (limit := most_ids(self.token_type, self.has_loss_mask)):
            raise ValueError(
                f"vocab_size = {self.vocab_size} is more than the {limit} ids of the type {self.token_type}"
            )
        if not self.sources:
            raise ValueError("has no source")
        if self.whole_documents and (self.format != FORMAT or not self.mask_across_documents):
            raise ValueError(f"has whole_documents, but not format 10 ({self.format}) or not mask_across_documents")
        if self.row_groups and self.format not in (_OF_CUT_DOCUMENTS, FORMAT):
            raise ValueError(f"has the field row_groups, which format {self.format} does not have")
        row_bytes = np.dtype(self.token_type).itemsize * (self.sequence_length + 1)
        for source, splits in self.sources.items():
            if (TRAIN in splits) == self.is_eval_only:
                found = f"has the splits {sorted(splits)} of {source}"
                raise ValueError(f"{found}, which contradicts heldout_fraction = {self.heldout_fraction}")
            for name, split in splits.items():
                _check_split(f"{name} of {source}", split, row_bytes)
        return self

    @property
    def splits(self) -> dict[str, Split]:
        """Name of a split, train or heldout -> its rows from all sources, one source after the other."""
        by_split = {
            name: [splits[name] for splits in self.sources.values() if name in splits] for name in (TRAIN, HELDOUT)
        }
        return {name: _together(found) for name, found in by_split.items() if found}

    def of(self, source: str) -> Manifest:
        """Return a copy of the manifest that has only the rows of ``source``."""
        return self.model_copy(update={"sources": {source: self.sources[source]}})

    @property
    def is_eval_only(self) -> bool:
        """True if all text of the dataset is held out for evaluation, so nothing can be trained on."""
        return self.heldout_fraction == 1

    @property
    def eos_id(self) -> int | None:
        """The end-of-document id if documents are masked from each other, else None."""
        return self.end_of_text if self.mask_across_documents else None

    @property
    def bos_id(self) -> int | None:
        """The begin-of-text id if documents are masked from each other, else None."""
        return self.begin_of_text if self.mask_across_documents else None

    @property
    def document_ids(self) -> tuple[int | None, int | None, bool]:
        """``eos_id``, ``bos_id`` and ``whole_documents``. A model needs them to find where documents begin in a row."""
        return self.eos_id, self.bos_id, self.whole_documents

    @property
    def holds_ends_inside(self) -> bool:
        """True if a document may contain its end id in the middle too, as in multi-turn chats where each turn ends with that
        id."""
        return bool(self.source.get("ends_inside"))

    @property
    def holds_pairs(self) -> bool:
        """True if each document is a pair of answers for preference training, with the chosen and the rejected answer side by
        side."""
        return bool(self.source.get("pairs"))

    @property
    def memory_type(self) -> str:
        """NumPy type of the tokens that readers return. The top bit of a token is the loss mask."""
        return memory_type(self.token_type, self.vocab_size)

    @property
    def digest(self) -> str:
        """Hash over all fields, 32 hex digits. The hash that identifies the data order of a run includes this hash."""
        record = self.model_dump(mode="json") if self.row_groups else self.in_full()
        if self.format != FORMAT:
            record.pop("whole_documents", None)  # earlier formats do not have this field
        text = to_json(record, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def in_full(self) -> dict[str, Any]:
        """Return all fields as plain data, with a list of all row groups, as format 8 stores them in the manifest."""
        record = self.model_dump(mode="json", exclude={"row_groups", "whole_documents"})
        for source, splits in self.sources.items():
            for name, split in splits.items():
                shards = [shard.model_dump(mode="json") for shard in split.shards]
                record["sources"][source][name]["shards"] = shards
        return record


def _check_split(name: str, split: Split, row_bytes: int) -> None:
    """Raise ValueError if the counts and offsets of a split contradict each other."""
    try:
        split.shards.check(split.rows, row_bytes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _together(splits: Sequence[Split]) -> Split:
    if len(splits) == 1:
        return splits[0]
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        num_bytes=sum(split.num_bytes for split in splits),
        rows=sum(split.rows for split in splits),
        shards=ShardTable.joined([split.shards for split in splits]),
    )


def write_manifest(dataset: Folder, manifest: Manifest) -> None:
    """Write the index of a dataset's row groups, then its manifest, each with a digest. Without the digests, a flipped bit in a
    number could pass all other checks and misplace a column."""
    record = write_index(dataset, {key: split.shards for key, split in _by_key(manifest.sources).items()})
    version = FORMAT if manifest.whole_documents else _OF_CUT_DOCUMENTS
    sealed = manifest.model_copy(update={"format": version, "row_groups": record})
    left_out = set() if manifest.whole_documents else {"whole_documents"}
    dataset.write_json(MANIFEST, {**sealed.model_dump(mode="json", exclude=left_out), "digest": sealed.digest})


def load_manifest(dataset: Folder, cache: Cache | None = None) -> Manifest:
    """Load the manifest of a sealed (complete) dataset. Raises CorpusError if it is missing, damaged or of another format.

    ``cache``: this node's disk cache. If the dataset is in object storage, the cache stores its index once for all processes of
    the node.
    """
    try:
        record = dataset.read_json(MANIFEST)
        if isinstance(record, dict) and record.get("format") not in _READ:
            limit = (
                f"is in format {record.get('format')!r:.40}, this version of springtide reads {_READ[0]} to {FORMAT}"
            )
            remedy = "prepare it again, or use the version that wrote it"
            raise CorpusError(explain("shards.dataset", dataset.url, limit, remedy))
        sealed = record.pop("digest", None) if isinstance(record, dict) else None
        if isinstance(record, dict) and record["format"] != _READ[0]:
            _open_index(dataset, record, cache)
        manifest = Manifest.model_validate(record)
        if manifest.digest != sealed:
            raise ValueError(f"digest expected {sealed!r:.40}, found {manifest.digest}")
        return manifest
    except CorpusError:
        raise
    except FileNotFoundError:
        raise CorpusError(
            explain("shards.dataset", dataset.url, "holds no sealed dataset", "run `springtide data prepare` first")
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or not a valid manifest
        raise CorpusError(
            explain("shards.dataset", dataset.url, f"has a manifest that cannot be read ({error})", "prepare it again")
        ) from None


def _open_index(dataset: Folder, record: dict[str, Any], cache: Cache | None) -> None:
    """Replace the counts of shards in ``record``, the parsed manifest, by the shards that the index file lists. Raises
    ValueError if the manifest's fields for the counts or for the index are not valid."""
    counts = _COUNTS.validate_python(
        {key: split.get("shards") for key, split in _by_key(record.get("sources")).items()}
    )
    index = IndexRecord.model_validate(record.get("row_groups"))
    for (source, split), table in read_index_of(dataset, index, counts, cache).items():
        record["sources"][source][split]["shards"] = table


def _by_key(sources: Any) -> dict[tuple[str, str], Any]:
    """Return (source, split) -> its entry in ``sources``. Raises ValueError unless ``sources`` is a dict of dicts."""
    if not isinstance(sources, dict) or not all(isinstance(splits, dict) for splits in sources.values()):
        raise ValueError("sources does not map names of sources to splits")
    found = {(source, split): one for source, splits in sources.items() for split, one in splits.items()}
    if not found or not all(isinstance(one, (dict, Split)) for one in found.values()):
        raise ValueError("sources has no splits")
    return found
