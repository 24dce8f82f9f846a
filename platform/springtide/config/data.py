"""The sections that decide what a run sees: text, vocabulary, packing, the order of samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from springtide.config.quantities import Tokens
from springtide.config.section import Section, ahead, free
from springtide.errors import explain

Weight = Annotated[float, Field(ge=0)]


class SourceConfig(Section):
    """One of several sources, and where it is read or cleaned otherwise than ``corpus`` says."""

    source: str
    """As corpus.source [url]."""
    max_files: int | None = Field(None, ge=0)
    """Take at most this many files; 0 takes all [files]."""
    field: str | None = None
    """Where a record of JSON lines or Parquet has its text [name]."""
    normalization: Literal["none", "NFC", "NFKC"] | None = None
    """Unicode normal form that texts are brought to [name]."""
    broken_text: Literal["replace", "drop"] | None = None
    """What becomes of texts with bytes that are not UTF-8 [name]."""
    min_characters: int | None = Field(None, ge=1)
    """Shortest document to keep [characters]."""
    max_characters: int | None = Field(None, ge=0)
    """Longest document to keep; 0 keeps all [characters]."""
    max_repetition: float | None = Field(None, ge=0, le=1)
    """Largest share of characters in repeated lines; 1 keeps all [ratio]."""
    max_symbols: float | None = Field(None, ge=0, le=1)
    """Largest share of characters that are no letters or digits, spaces apart; 1 keeps all [ratio]."""


class CorpusConfig(Section):
    """Raw text and the vocabulary that turns it into token ids."""

    source: str = "stdlib"
    """``stdlib`` (the running Python's own library), or a file, folder or glob, local or any fsspec URL [url]."""
    sources: tuple[SourceConfig, ...] = ()
    """Several in place of the one: tables of a ``source``, and of what of ``max_files``, ``field`` and filters differs for it
    [table]."""
    tokenizer: str = "bpe"
    """``bpe`` (trained on the corpus), ``bytes``, ``tiktoken:NAME``, or the path of a ``tokenizer.json`` [name or path]."""
    vocab_size: int = Field(4096, ge=257)
    """Ids in a vocabulary that is trained here, end-of-text included [ids]."""
    max_files: int = Field(0, ge=0)
    """Take at most this many files; 0 takes all [files]."""
    field: str = "text"
    """Where a record of JSON lines or Parquet has its text [name]."""
    normalization: Literal["none", "NFC", "NFKC"] = "NFC"
    """Unicode normal form that texts are brought to [name]."""
    broken_text: Literal["replace", "drop"] = "replace"
    """What becomes of texts with bytes that are not UTF-8: each such byte U+FFFD, or the document dropped [name]."""
    min_characters: int = Field(1, ge=1)
    """Shortest document to keep [characters]."""
    max_characters: int = Field(0, ge=0)
    """Longest document to keep; 0 keeps all [characters]."""
    max_repetition: float = Field(1.0, ge=0, le=1)
    """Largest share of characters in repeated lines; 1 keeps all [ratio]."""
    max_symbols: float = Field(1.0, ge=0, le=1)
    """Largest share of characters that are no letters or digits, spaces apart; 1 keeps all [ratio]."""
    near_duplicates: bool = True
    """Whether to keep one of each cluster of documents that share most of their text [flag]."""

    def each(self) -> tuple[CorpusConfig, ...]:
        """One config a source, its own fields in place of the common ones."""
        if not self.sources:
            return (self,)
        own = (source.model_dump(exclude_none=True) for source in self.sources)
        return tuple(self.model_copy(update={**fields, "sources": ()}) for fields in own)


class ShardsConfig(Section):
    """Token ids packed into rows and sealed as Parquet."""

    root: str = free(default="datasets")
    """Folder or fsspec URL that holds prepared datasets [url]."""
    dataset: str = free(default="")
    """A prepared dataset to use as it is; empty finds or makes the one for this corpus [url]."""
    sequence_length: int = Field(256, ge=2)
    """Tokens a row trains on; a row stores one more, the first input [tokens]."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """How a token id is stored [type]."""
    packing: Literal["concat", "best_fit"] = "concat"
    """Documents end to end and cut where a row is full, or whole documents fitted together, none cut that fits a row [name]."""
    mask_across_documents: bool = False
    """Whether attention, positions and loss begin anew at each document of a row; best_fit needs it [flag]."""
    rows_per_group: int = Field(256, ge=1, le=20_000)
    """Rows in one Parquet row group, the unit of reading: its tokens are one ranged read, best of a few MiB [rows]."""
    groups_per_shard: int = Field(16, ge=1)
    """Row groups in one Parquet file [row groups]."""
    heldout_fraction: float = Field(0.02, gt=0, lt=0.5)
    """Share of the documents, chosen by their hash, kept for evaluation [ratio]."""
    seed: int = Field(0, ge=0)
    """Key of the order in which documents are packed [1]."""

    @model_validator(mode="after")
    def _check(self) -> ShardsConfig:
        if self.packing == "best_fit" and not self.mask_across_documents:
            raise ValueError(
                explain(
                    "shards.packing",
                    self.packing,
                    "fills rows with ends of text, which only shards.mask_across_documents leaves out of the loss",
                    "set shards.mask_across_documents, or pack with concat",
                )
            )
        return self


class Weights(Section):
    """Shares of a mixture from a step on."""

    from_step: int = Field(0, ge=0)
    """First step of the order they hold for [steps]."""
    from_tokens: Tokens = Tokens(0)
    """The same in tokens of full steps; the later of the two counts [tokens]."""
    shares: dict[str, Weight]
    """Corpus -> weight; they are divided by their sum, and a corpus left out has none [1]."""


class SkippedSamples(Section):
    """Rows that are left out of their batches from a step on."""

    from_step: int = Field(0, ge=0)
    """First step of the order they are left out of [steps]."""
    samples: tuple[int, ...]
    """Sample ids, as the feed's errors and ``springtide data inspect`` show them [ids]."""


class SmallerBatches(Section):
    """A size of batch to begin with."""

    rows: int = Field(ge=1)
    """Rows in a step over all workers; a multiple of the lanes [rows]."""
    until_tokens: Tokens
    """Trained on when the next size begins, or stream.global_batch after the last [tokens]."""


class StreamConfig(Section):
    """Which rows make up each step: the order of samples."""

    seed: int = Field(0, ge=0)
    """Key of the order [1]."""
    global_batch: int = Field(16, ge=1)
    """Rows in a step over all workers, whatever their number [rows]."""
    ramp: tuple[SmallerBatches, ...] = ahead(default=())
    """Smaller batches to begin with, in steps of the order; empty trains with global_batch from the first on [table]."""
    lanes: int = Field(0, ge=0)
    """Parts of the order that workers own whole; must divide global_batch; 0 means global_batch [lanes]."""
    window: int = Field(512, ge=1)
    """Rows of a lane that are shuffled among each other, the bound of the read-ahead [rows]."""
    skip: tuple[int, ...] = ahead(default=())
    """Steps of the order to jump over [steps]."""
    skip_samples: tuple[SkippedSamples, ...] = ahead(default=())
    """Rows to leave out; their batches are smaller by them [table]."""
    mixture: dict[str, str] = free(default={})
    """Prepared datasets to mix, by name; empty trains on shards.dataset alone [urls]."""
    weights: tuple[Weights, ...] = ahead(default=())
    """Shares of the mixture as a schedule over steps or tokens; empty weighs each corpus by its rows [table]."""

    @property
    def num_lanes(self) -> int:
        return self.lanes or self.global_batch

    @model_validator(mode="after")
    def _check(self) -> StreamConfig:
        if self.global_batch % self.num_lanes:
            raise ValueError(
                explain(
                    "stream.lanes",
                    self.lanes,
                    f"must divide stream.global_batch = {self.global_batch}",
                    "choose a divisor, or 0 for one lane a row",
                )
            )
        until = 0
        for entry in self.ramp:
            if entry.rows % self.num_lanes or entry.rows > self.global_batch:
                limit = f"must be a multiple of the {self.num_lanes} lanes, and at most stream.global_batch"
                raise ValueError(
                    explain("stream.ramp.rows", entry.rows, limit, "set stream.lanes to a divisor of all sizes")
                )
            if entry.until_tokens <= until:
                limit = f"must be more than {until}, where the size before ends"
                raise ValueError(explain("stream.ramp.until_tokens", int(entry.until_tokens), limit, "sort the table"))
            until = int(entry.until_tokens)
        return self
