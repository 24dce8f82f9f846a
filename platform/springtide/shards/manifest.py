"""The manifest: the contents of a dataset and the digests of its bytes. Written last: with a manifest it is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from springtide.config.data import SOURCE_NAME
from springtide.errors import CorpusError, explain
from springtide.shards.loss_mask import memory_type, most_ids
from springtide.store import Folder, to_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""The chat template in a dataset's folder, under the name that model repositories give it."""
FORMAT = 8
"""Increase it when a reader of the previous format would misread or refuse the new one."""
TRAIN, HELDOUT = "train", "heldout"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""BLAKE3-128 in hex. Strictly checked, because a manifest's digests become file names in the cache."""
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowGroup(_Record):
    """One Parquet row group and the offsets of its values in the file, so that one ranged read fetches them all."""

    rows: Count
    sample_ids: Count
    """Offset of int64 (rows,), the beginning of the group's values [bytes]."""
    num_bytes: Count
    """Offset of int32 (rows,) [bytes]."""
    tokens: Count
    """Offset of the tokens' bytes, uint8 (bytes of the token type, rows, sequence_length + 1), lowest byte first [bytes]."""
    end: Count
    """End of the tokens' bytes [bytes]."""
    digest: Digest
    """Digest of the bytes from ``sample_ids`` to ``end``."""

    def fits(self, row_bytes: int) -> bool:
        """Return whether the offsets leave enough space for the rows, with ``row_bytes`` bytes of tokens per row."""
        after_ids, after_counts = self.sample_ids + 8 * self.rows, self.num_bytes + 4 * self.rows
        return after_ids <= self.num_bytes and after_counts <= self.tokens == self.end - self.rows * row_bytes


class Shard(_Record):
    """One Parquet file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*\.parquet$")
    rows: Count
    size_bytes: Count
    digest: Digest
    """Digest of the file."""
    signatures: Digest | None = None
    """Digest of the file of its documents' signatures; None if there is none."""
    groups: tuple[RowGroup, ...] = Field(min_length=1)


class Split(_Record):
    """The rows to train on, or the held-out rows, of a source or of all together."""

    documents: Count
    tokens: Count
    num_bytes: Count
    rows: Count
    shards: tuple[Shard, ...] = Field(min_length=1)

    def group_rows(self) -> list[int]:
        """Return the number of rows of each row group, in order over all shards."""
        return [group.rows for shard in self.shards for group in shard.groups]


class Manifest(_Record):
    """The manifest of a sealed dataset."""

    format: int = FORMAT
    sequence_length: Count
    token_type: Literal["uint16", "uint32"]
    vocab_size: Count
    end_of_text: Count
    begin_of_text: Count
    """The id that predicts the first token of a text; the end-of-document id if documents only have that between them."""
    mask_across_documents: bool = False
    """Whether attention, positions and loss restart at each document of a row."""
    has_loss_mask: bool = False
    """Whether some tokens are not predicted; the top bit of a stored id says which (``shards/loss_mask.py``)."""
    tokenizer_digest: Digest
    """Digest of ``tokenizer.json``; all corpora of a mixture have the same."""
    fingerprint: str
    """Fingerprint of the settings and the source it was prepared from."""
    heldout_fraction: float = Field(gt=0, le=1, allow_inf_nan=False)
    """Share of the documents that is held out, those with the smallest hashes of their text; 1 if there is nothing to train
    on."""
    apart_from: tuple[Digest, ...] = ()
    """Digests of the manifests of datasets that it was prepared apart from: neither trains on what the other holds out."""
    source: dict[str, Any]
    """What was read and dropped."""
    sources: dict[
        Annotated[str, Field(pattern=SOURCE_NAME)], dict[Annotated[str, Field(pattern="^(train|heldout)$")], Split]
    ]
    """Source -> split -> its rows, numbered from 0. A row holds documents of one source. A small source may hold out no row."""

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
        row_bytes = np.dtype(self.token_type).itemsize * (self.sequence_length + 1)
        for source, splits in self.sources.items():
            if (TRAIN in splits) == self.is_eval_only:
                found = f"has the splits {sorted(splits)} of {source}"
                raise ValueError(f"{found} and heldout_fraction = {self.heldout_fraction}")
            for name, split in splits.items():
                _check_split(f"{name} of {source}", split, row_bytes)
        return self

    @property
    def splits(self) -> dict[str, Split]:
        """The rows of all sources, one source after the other."""
        by_split = {
            name: [splits[name] for splits in self.sources.values() if name in splits] for name in (TRAIN, HELDOUT)
        }
        return {name: _together(found) for name, found in by_split.items() if found}

    def of(self, source: str) -> Manifest:
        """Return the manifest with the rows of this source alone."""
        return self.model_copy(update={"sources": {source: self.sources[source]}})

    @property
    def is_eval_only(self) -> bool:
        """Whether all its text is held out."""
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
    def holds_pairs(self) -> bool:
        """Whether its documents are pairs of answers, a chosen and a rejected one side by side."""
        return bool(self.source.get("pairs"))

    @property
    def memory_type(self) -> str:
        """Type of the tokens that are read; their top bit is the loss mask."""
        return memory_type(self.token_type, self.vocab_size)

    @property
    def digest(self) -> str:
        """32 hex digits over all fields; identifies the data in the order's identity."""
        text = to_json(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_split(name: str, split: Split, row_bytes: int) -> None:
    """Raise ValueError if the counts and offsets of a split contradict each other."""
    for shard in split.shards:
        if not all(group.fits(row_bytes) and group.end <= shard.size_bytes for group in shard.groups):
            raise ValueError(f"{shard.name} has a row group that is not inside the file")
        if shard.rows != sum(group.rows for group in shard.groups):
            raise ValueError(f"{shard.name} has another number of rows than its row groups")
    if split.rows != sum(shard.rows for shard in split.shards):
        raise ValueError(f"{name} has another number of rows than its shards")


def _together(splits: Sequence[Split]) -> Split:
    if len(splits) == 1:
        return splits[0]
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        num_bytes=sum(split.num_bytes for split in splits),
        rows=sum(split.rows for split in splits),
        shards=tuple(shard for split in splits for shard in split.shards),
    )


def write_manifest(dataset: Folder, manifest: Manifest) -> None:
    """Write a dataset's manifest and its digest: a number with a flipped bit may still fit, and misplace a column."""
    dataset.write_json(MANIFEST, {**manifest.model_dump(mode="json"), "digest": manifest.digest})


def load_manifest(dataset: Folder) -> Manifest:
    """Load the manifest of a sealed dataset; CorpusError if it is missing, damaged or of another format."""
    try:
        record = dataset.read_json(MANIFEST)
        if isinstance(record, dict) and record.get("format") != FORMAT:
            limit = f"is in format {record.get('format')!r:.40}, this version of springtide reads {FORMAT}"
            remedy = "prepare it again, or use the version that wrote it"
            raise CorpusError(explain("shards.dataset", dataset.url, limit, remedy))
        sealed = record.pop("digest", None) if isinstance(record, dict) else None
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
