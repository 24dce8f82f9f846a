"""The manifest: what a dataset holds and the digests of its bytes. Written last, so a dataset with one is whole."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from springtide.errors import CorpusError, explain
from springtide.store import Folder

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = 3
TRAIN, HELDOUT = "train", "heldout"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Group(_Record):
    """One Parquet row group, and where its values lie in the file, so that one ranged read fetches what is needed of it."""

    rows: int
    sample_ids: int
    """Offset of int64 (rows,), where the group begins [bytes]."""
    num_bytes: int
    """Offset of int32 (rows,) [bytes]."""
    tokens: int
    """Offset of the tokens' bytes, uint8 (bytes of the token type, rows, sequence_length + 1), lowest first [bytes]."""
    end: int
    """Where they end [bytes]."""
    crc32: int
    """Over the bytes from ``sample_ids`` to ``end``."""


class Shard(_Record):
    """One Parquet file."""

    name: str
    rows: int
    size_bytes: int
    digest: str
    """BLAKE2b-128 of the file."""
    groups: tuple[Group, ...]


class Split(_Record):
    """Rows that belong together: those to train on, those held out."""

    documents: int
    tokens: int
    num_bytes: int
    rows: int
    shards: tuple[Shard, ...]

    def group_rows(self) -> list[int]:
        """Rows of every row group, in order over all shards."""
        return [group.rows for shard in self.shards for group in shard.groups]


class Manifest(_Record):
    """A sealed dataset."""

    format: int = FORMAT
    sequence_length: int
    token_type: str
    vocab_size: int
    end_of_text: int
    separate_documents: bool = False
    """Whether attention, positions and loss begin anew at each document of a row."""
    tokenizer_digest: str
    """BLAKE2b-128 of ``tokenizer.json``: corpora that are mixed share it."""
    fingerprint: str
    """Of the settings and the source it was prepared from."""
    source: dict[str, Any]
    splits: dict[str, Split]

    @property
    def separator(self) -> int | None:
        """``end_of_text`` where documents are kept apart."""
        return self.end_of_text if self.separate_documents else None

    @property
    def digest(self) -> str:
        """32 hex digits over everything above; names the data in the order's identity."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_manifest(dataset: Folder) -> Manifest:
    """The manifest of a sealed dataset; CorpusError when there is none or it is of another format."""
    try:
        return Manifest.model_validate(dataset.read_json(MANIFEST))
    except FileNotFoundError:
        raise CorpusError(
            explain("shards.dataset", dataset.url, "holds no sealed dataset", "run `springtide prepare` first")
        ) from None
    except (ValidationError, json.JSONDecodeError) as error:
        raise CorpusError(
            explain("shards.dataset", dataset.url, f"has a manifest that cannot be read ({error})", "prepare it again")
        ) from None
