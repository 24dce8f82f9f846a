"""The manifest: what a dataset holds and the digests of its bytes. Written last, so a dataset with one is whole."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from springtide.errors import CorpusError, explain
from springtide.store import Folder

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = 5
"""Raise it when a reader of the number before would misread or refuse what is written."""
TRAIN, HELDOUT = "train", "heldout"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""BLAKE3-128 in hex. What a manifest says becomes names of files, so nothing else will do."""
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowGroup(_Record):
    """One Parquet row group, and where its values lie in the file, so that one ranged read fetches what is needed of it."""

    rows: Count
    sample_ids: Count
    """Offset of int64 (rows,), where the group begins [bytes]."""
    num_bytes: Count
    """Offset of int32 (rows,) [bytes]."""
    tokens: Count
    """Offset of the tokens' bytes, uint8 (bytes of the token type, rows, sequence_length + 1), lowest first [bytes]."""
    end: Count
    """Where they end [bytes]."""
    digest: Digest
    """Of the bytes from ``sample_ids`` to ``end``."""

    def fits(self, row_bytes: int) -> bool:
        """Whether the offsets leave room for the rows, whose tokens take ``row_bytes`` each."""
        after_ids, after_counts = self.sample_ids + 8 * self.rows, self.num_bytes + 4 * self.rows
        return after_ids <= self.num_bytes and after_counts <= self.tokens == self.end - self.rows * row_bytes


class Shard(_Record):
    """One Parquet file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*\.parquet$")
    rows: Count
    size_bytes: Count
    digest: Digest
    """Of the file."""
    groups: tuple[RowGroup, ...] = Field(min_length=1)


class Split(_Record):
    """Rows that belong together: those to train on, those held out."""

    documents: Count
    tokens: Count
    num_bytes: Count
    rows: Count
    shards: tuple[Shard, ...] = Field(min_length=1)

    def group_rows(self) -> list[int]:
        """Rows of every row group, in order over all shards."""
        return [group.rows for shard in self.shards for group in shard.groups]


class Manifest(_Record):
    """A sealed dataset."""

    format: int = FORMAT
    sequence_length: Count
    token_type: Literal["uint16", "uint32"]
    vocab_size: Count
    end_of_text: Count
    mask_across_documents: bool = False
    """Whether attention, positions and loss begin anew at each document of a row."""
    tokenizer_digest: Digest
    """Of ``tokenizer.json``: corpora that are mixed share it."""
    fingerprint: str
    """Of the settings and the source it was prepared from."""
    source: dict[str, Any]
    splits: dict[str, Split]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text = {self.end_of_text} is none of the {self.vocab_size} ids")
        row_bytes = np.dtype(self.token_type).itemsize * (self.sequence_length + 1)
        for name, split in self.splits.items():
            for shard in split.shards:
                if not all(group.fits(row_bytes) and group.end <= shard.size_bytes for group in shard.groups):
                    raise ValueError(f"{shard.name} has a row group that does not lie in it")
                if shard.rows != sum(group.rows for group in shard.groups):
                    raise ValueError(f"{shard.name} has other rows than its row groups")
            if split.rows != sum(shard.rows for shard in split.shards):
                raise ValueError(f"{name} has other rows than its shards")
        return self

    @property
    def eos_id(self) -> int | None:
        """``end_of_text`` where documents are kept apart."""
        return self.end_of_text if self.mask_across_documents else None

    @property
    def digest(self) -> str:
        """32 hex digits over everything above; names the data in the order's identity."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_manifest(dataset: Folder) -> Manifest:
    """The manifest of a sealed dataset; CorpusError when there is none or it is of another format."""
    try:
        record = dataset.read_json(MANIFEST)
        if isinstance(record, dict) and record.get("format") != FORMAT:
            limit = f"is in format {record.get('format')}, this version of springtide reads {FORMAT}"
            remedy = "prepare it again, or use the version that wrote it"
            raise CorpusError(explain("shards.dataset", dataset.url, limit, remedy))
        return Manifest.model_validate(record)
    except CorpusError:
        raise
    except FileNotFoundError:
        raise CorpusError(
            explain("shards.dataset", dataset.url, "holds no sealed dataset", "run `springtide data prepare` first")
        ) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nothing that could be
        raise CorpusError(
            explain("shards.dataset", dataset.url, f"has a manifest that cannot be read ({error})", "prepare it again")
        ) from None
