"""The sections that decide what data a run trains on: text, tokenizer, packing, the order of samples."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from springtide.config.quantities import Bytes, Tokens
from springtide.config.section import Section, ahead, free
from springtide.config.steps import StepsDone
from springtide.errors import explain

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of a tokenizer that springtide makes, if ``corpus.end_of_text`` is empty."""

_ONE_LINE = r"^[^\r\n]*$"

BLANK_LINE = "blank_line"
"""Value of ``corpus.separator``: documents are separated by empty lines."""

CHAT_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Built-in chat template -> its special tokens, which are added to a tokenizer that springtide makes."""

MODEL_TEMPLATE = "model"
"""Value of ``corpus.chat_template``: the template that came with the imported model."""

LanguageCode = Annotated[str, Field(pattern="^[a-z]{2}$")]

Weight = Annotated[float, Field(ge=0)]

SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of the name of a source in a dataset."""
WHOLE = "corpus"
"""Name of the only source in a dataset that is made from ``corpus.source``."""


class SourceConfig(Section):
    """One of several sources. A field that is not None replaces the field of the same name in ``corpus`` for this source."""

    source: str
    """The text of this source: a file, folder, glob or URL, as for corpus.source [url]."""
    max_files: int | None = Field(None, ge=0)
    """Take at most this many files; 0 takes all [files]."""
    field: str | None = None
    """Field that holds the text, or token ids, in JSON lines, Parquet records and MDS samples [name]."""
    separator: str | None = Field(None, pattern=_ONE_LINE)
    """Text between the documents of a text file, ``blank_line`` for empty lines; empty: each file is one document [name]."""
    normalization: Literal["none", "NFC", "NFKC"] | None = None
    """Unicode normal form that texts are converted to [name]."""
    broken_text: Literal["replace", "drop"] | None = None
    """How to treat texts with bytes that are not UTF-8 [name]."""
    min_characters: int | None = Field(None, ge=1)
    """Shortest document to keep [characters]."""
    max_characters: int | None = Field(None, ge=0)
    """Longest document to keep; 0 keeps all [characters]."""
    max_repetition: float | None = Field(None, ge=0, le=1)
    """Drop documents with a larger share of their characters in repeated lines; 1 keeps all [ratio]."""
    max_symbols: float | None = Field(None, ge=0, le=1)
    """Drop documents with a larger share of characters that are not letters, digits or spaces; 1 keeps all [ratio]."""
    quality: tuple[Literal["gopher", "c4"], ...] | None = None
    """Replaces corpus.quality for this source [name]."""
    languages: tuple[LanguageCode, ...] | None = None
    """Replaces corpus.languages for this source [name]."""
    pii: tuple[Literal["emails", "ip_addresses"], ...] | None = None
    """Replaces corpus.pii for this source [name]."""
    fim: float | None = Field(None, ge=0, le=1)
    """Replaces corpus.fim for this source [ratio]."""
    chat_template: str | None = None
    """Replaces corpus.chat_template for this source; empty if the source is text, not chats [name or path]."""


def _source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Source = Annotated[SourceConfig, BeforeValidator(_source)]
"""A source as a table, or only its URL."""


class CorpusConfig(Section):
    """Raw text and the tokenizer that turns it into token ids."""

    source: str = "stdlib"
    """``stdlib`` (the running Python's standard library), or a file, folder or glob, local or any fsspec URL, also
    ``hf://datasets/OWNER/NAME``. Recipes that need more text than springtide has leave it empty: name your own text [url]."""
    sources: dict[Annotated[str, Field(pattern=SOURCE_NAME)], Source] = Field({})
    """Several sources in place of one, by name. Each is a URL, or a table with ``source`` and the settings that differ for it,
    such as ``max_files``, ``field`` and filters. A row holds text of one source; ``stream.weights`` can weigh the sources
    [table]."""
    tokenizer: str = "bpe"
    """``bpe`` (trained on the corpus), ``bytes``, ``tiktoken:NAME``, or the path of a ``tokenizer.json`` [name or path]."""
    end_of_text: str = ""
    """Token that ends a document. Empty: the first of ``<|endoftext|>``, ``<|end_of_text|>``, ``</s>`` and ``<eos>`` that the
    tokenizer has [name]."""
    begin_of_text: str = ""
    """Token that begins each document and is never predicted. Empty: no token; but with ``shards.mask_across_documents`` the
    token that ends documents also begins them [name]."""
    vocab_size: int = Field(4096, ge=257)
    """Number of ids of a tokenizer that springtide trains (``bpe``), special tokens included [ids]."""
    special_tokens: tuple[str, ...] = ()
    """Additional special tokens of a tokenizer that springtide makes (``bpe`` or ``bytes``), such as those of chats or of
    fill-in-the-middle. If a document contains the spelling of a special token, that spelling stays plain text [name]."""
    pretokenizer: Literal["gpt2", "gpt4", "gpt4o", "llama3", "qwen"] = "gpt4"
    """Published pattern by which a BPE tokenizer that springtide trains splits text into words. The patterns differ most in how
    many digits a word may have: any number (gpt2), up to three (gpt4, gpt4o, llama3) or one (qwen) [name]."""
    tokenizer_characters: int = Field(100_000_000, ge=1)
    """Amount of text that a BPE is trained on, taken from every source [characters]."""
    max_files: int = Field(0, ge=0)
    """Take at most this many files; 0 takes all [files]."""
    field: str = "text"
    """Field that holds the text, or token ids, in JSON lines, Parquet records and MDS samples [name]."""
    separator: str = Field("", pattern=_ONE_LINE)
    """Text between the documents of a text file, such as ``<|endoftext|>``, or ``blank_line`` for empty lines; empty: each file
    is one document [name]."""
    chat_template: str = ""
    """Layout of chats: ``chatml``, ``llama3``, ``plain``, the path of a Jinja file, or ``model``: an imported model's template,
    in the folder of the ``tokenizer.json`` that corpus.tokenizer names. Empty: documents are text, not chats. A chat in JSON
    lines or Parquet has ``messages`` (or the field corpus.field), a list of {role, content}; or ``prompt`` and ``completion``;
    or ``instruction``, ``input`` and ``output``. Only the assistant's answers are trained on [name or path]."""
    normalization: Literal["none", "NFC", "NFKC"] = "NFC"
    """Unicode normal form that texts are converted to [name]."""
    broken_text: Literal["replace", "drop"] = "replace"
    """How to treat texts with bytes that are not UTF-8: replace each such byte by U+FFFD, or drop the document [name]."""
    min_characters: int = Field(1, ge=1)
    """Shortest document to keep [characters]."""
    max_characters: int = Field(0, ge=0)
    """Longest document to keep; 0 keeps all [characters]."""
    max_repetition: float = Field(1.0, ge=0, le=1)
    """Drop documents with a larger share of their characters in repeated lines; 1 keeps all [ratio]."""
    max_symbols: float = Field(1.0, ge=0, le=1)
    """Drop documents with a larger share of characters that are not letters, digits or spaces; 1 keeps all [ratio]."""
    quality: tuple[Literal["gopher", "c4"], ...] = ()
    """Published rules for English text, in the order to apply them: ``gopher`` drops documents by their words, lines and
    repetitions (2112.11446), ``c4`` removes lines and drops documents (1910.10683) [name]."""
    languages: tuple[LanguageCode, ...] = ()
    """ISO 639-1 codes of the languages to keep, such as ``en``; empty keeps all; needs ``pip install 'springtide[language]'``
    [name]."""
    filter: str = Field("", pattern=r"^$|^[^:\s]+:[^:\s]+$")
    """Your own filter, ``package.module:function``: called with each text, it returns the text, changed or not, or None to drop
    it. If a config file names a filter, it needs --trust-code [name]."""
    pii: tuple[Literal["emails", "ip_addresses"], ...] = ()
    """Personal data that is masked: email addresses, public IP addresses [name]."""
    fim: float = Field(0.0, ge=0, le=1)
    """Fill-in-the-middle rate (2207.14255): probability that a training document is rearranged, so that the model learns to
    fill gaps. The order is prefix, suffix, middle (PSM) or suffix, prefix, middle (SPM). A document longer than a row is cut
    into parts of about a row, and each part is rearranged with this probability [ratio]."""
    fim_tokens: tuple[str, str, str] = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    """Special tokens before the prefix, suffix and middle of a rearranged document. If corpus.fim is not 0, a tokenizer that
    springtide makes gets them [name]."""
    deduplicate: Literal["documents", "paragraphs", "lines"] = "documents"
    """What to remove if its text occurred before in the corpus. documents: whole documents. paragraphs or lines: also single
    paragraphs or lines of at least 50 characters; this reads the corpus twice [name]."""
    near_duplicates: bool = True
    """Whether to keep only one of each cluster of documents that share most of their text [flag]."""
    apart_from: tuple[Source, ...] = ()
    """Decontamination: prepared datasets and benchmark texts that this corpus must not overlap, as URLs or as tables like those
    of ``sources``. A document is dropped if it is close to held-out text of such a dataset, or shares 13 consecutive words with
    a benchmark. A held-out document is also dropped if it is close to training text of such a dataset [urls]."""

    _beside: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def paths(self) -> Mapping[str, str]:
        """Path as the user typed it -> absolute path, for files that exist only in the folder of the config file."""
        return self._beside

    def path(self, typed: str) -> str:
        """Return the path to open for ``typed``, a path in this section. The path is absolute if the file exists only in
        the folder of the config file. Otherwise it is ``typed``, unchanged."""
        return self._beside.get(typed, typed)

    def with_paths(self, beside: Mapping[str, str]) -> None:
        """Add the entries of ``beside`` (path as typed -> absolute path) to ``paths``."""
        self._beside.update(beside)

    @model_validator(mode="after")
    def _check(self) -> CorpusConfig:
        if self.special_tokens and self.tokenizer not in ("bpe", "bytes"):
            problem = f"are for a tokenizer that is made here, corpus.tokenizer is {self.tokenizer!r}"
            raise ValueError(
                explain("corpus.special_tokens", self.special_tokens, problem, "add them to that tokenizer")
            )
        if len({*self.fim_tokens}) < len(self.fim_tokens):
            raise ValueError(
                explain("corpus.fim_tokens", self.fim_tokens, "must be three different tokens", "name each once")
            )
        for name, each in self.each().items():
            self._check_chats("corpus" if name == WHOLE else f"corpus.sources.{name}", each)
        named = {self.end_of_text or END_OF_TEXT, *self.named_tokens}
        if self.tokenizer == "bpe" and self.vocab_size < 256 + len(named):
            problem = f"is less than the 256 bytes and {len(named)} special tokens"
            raise ValueError(explain("corpus.vocab_size", self.vocab_size, problem, "choose a larger vocabulary"))
        return self

    def _check_chats(self, name: str, each: CorpusConfig) -> None:
        """Raise ValueError if a source of chats has settings that rewrite whole texts: the positions of the assistant's answers
        would be lost."""
        settings = {
            f"{name}.quality": each.quality,
            f"{name}.fim": each.fim,
            "corpus.filter": each.filter,
            "corpus.deduplicate": each.deduplicate if each.deduplicate != "documents" else "",
        }
        for setting, value in settings.items():
            if each.chat_template and value:
                problem = f"is for texts, and corpus.chat_template = {each.chat_template!r} says that they are chats"
                raise ValueError(
                    explain(setting, value, problem, f"leave {setting} out, or set it for other sources only")
                )

    @property
    def named_tokens(self) -> tuple[str, ...]:
        """Special tokens, except the end-of-text token, of a tokenizer that springtide makes (``bpe`` or ``bytes``)."""
        each = self.each().values()
        chats = dict.fromkeys(token for one in each for token in CHAT_TOKENS.get(one.chat_template, ()))
        fills = self.fim_tokens if any(one.fim for one in each) else ()
        return (*filter(None, (self.begin_of_text,)), *self.special_tokens, *fills, *chats)

    def each(self) -> dict[str, CorpusConfig]:
        """Return one config per source, by name, in which the source's own fields replace those of ``corpus``."""
        if not self.sources:
            return {WHOLE: self}
        own = {name: source.model_dump(exclude_none=True) for name, source in self.sources.items()}
        return {name: self.model_copy(update={**fields, "sources": {}}) for name, fields in own.items()}


class ShardsConfig(Section):
    """Token ids packed into rows and written as Parquet."""

    root: str = free(default="datasets")
    """Folder or fsspec URL that holds prepared datasets [url]."""
    dataset: str = free(default="")
    """Prepared dataset to use. Empty: the dataset made from ``corpus``, which is prepared if it does not exist [url]."""
    sequence_length: int = Field(256, ge=2)
    """Tokens of a row that are predicted. A row stores one token more, because its first token is only an input [tokens]."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """Type in which a token id is stored. uint16 holds 65,536 ids, or 32,768 if some tokens are not predicted: the top bit
    marks those tokens [type]."""
    packing: Literal["concat", "best_fit"] = "concat"
    """``concat`` puts documents end to end and cuts them where a row is full; ``best_fit`` fits whole documents together and
    cuts only those longer than a row [name]."""
    mask_across_documents: bool = False
    """Whether attention, positions and loss restart at each document of a row; needed for packing best_fit [flag]."""
    rows_per_group: int = Field(256, ge=1, le=20_000)
    """Rows in one Parquet row group, the unit of reading: one ranged read, ideally of a few MiB, fetches its tokens [rows]."""
    groups_per_shard: int = Field(16, ge=1)
    """Row groups in one Parquet file [row groups]."""
    heldout_fraction: float = Field(0.02, gt=0, le=1)
    """Share of the documents, chosen by their hash, that is held out for evaluation: less than 0.5, or 1 for a dataset that is
    only used for evaluation [ratio]."""
    heldout_tokens: Tokens = Tokens(10_000_000)
    """Most tokens to hold out: if heldout_fraction would hold out more, a smaller share of the documents is held out; 0 sets no
    limit [tokens]."""
    seed: int = Field(0, ge=0)
    """Seed of the order in which documents are packed [1]."""

    @model_validator(mode="after")
    def _check(self) -> ShardsConfig:
        if 0.5 <= self.heldout_fraction < 1:
            limit, remedy = "must be less than 0.5, or 1", "hold out less, or all for a dataset to evaluate on only"
            raise ValueError(explain("shards.heldout_fraction", self.heldout_fraction, limit, remedy))
        if self.packing == "best_fit" and not self.mask_across_documents:
            raise ValueError(
                explain(
                    "shards.packing",
                    self.packing,
                    "pads rows with end-of-document ids, which only shards.mask_across_documents excludes from the loss",
                    "set shards.mask_across_documents, or pack with concat",
                )
            )
        return self


class Weights(Section):
    """Weights of the corpora in a mixture, and the step from which they apply."""

    from_step: int = Field(0, ge=0)
    """First step that the shares apply to, as an index in the order of batches [steps]."""
    from_tokens: Tokens = Tokens(0)
    """Number of trained tokens after which the shares apply. If from_step is set too, the later step applies [tokens]."""
    shares: dict[str, Weight]
    """Corpus -> weight; weights are divided by their sum, and a corpus that is not listed has weight 0 [1]."""


class SkippedSamples(Section):
    """Rows to exclude from their batches, and the step from which to exclude them."""

    from_step: int = Field(0, ge=0)
    """First step whose batch excludes the rows, as an index in the order of batches [steps]."""
    samples: tuple[int, ...]
    """Sample ids of the rows, as errors of the data pipeline and ``springtide inspect`` show them [ids]."""


class SmallerBatches(Section):
    """A batch size at the beginning of the run."""

    rows: int = Field(ge=1)
    """Rows in a step over all workers; a multiple of the number of lanes (``stream.lanes``) [rows]."""
    until_tokens: Tokens
    """Number of trained tokens at which this size ends. After the last entry, steps have stream.global_batch rows [tokens]."""


class StreamConfig(Section):
    """Which rows make up each step: the order of samples."""

    seed: int = Field(0, ge=0)
    """Seed of the order of rows [1]."""
    global_batch: int = Field(16, ge=1)
    """Rows in a step, summed over all workers; the same at any number of workers [rows]."""
    ramp: tuple[SmallerBatches, ...] = ahead(default=())
    """Smaller batches at the beginning of the run. If the run jumps over a step, this schedule counts the step's tokens as
    trained. Empty: all steps have global_batch rows [table]."""
    lanes: int = Field(0, ge=0)
    """Number of lanes: equal parts of each batch, which are dealt to the workers. Each worker has one lane or more. Must divide
    global_batch; 0 makes each row a lane [lanes]."""
    window: Tokens = Field(Tokens(4_000_000), ge=1)
    """Size of a shuffle window, a group of consecutive rows that are shuffled with each other; rounded down to whole rows. A
    larger window spreads the rows of a long document over more steps, and reads further ahead. A corpus of less than two
    windows is shuffled as a whole [tokens]."""
    skip: tuple[int, ...] = ahead(default=())
    """Steps that the run jumps over, as indexes in the order of batches [steps]."""
    skip_samples: tuple[SkippedSamples, ...] = ahead(default=())
    """Rows to exclude from training; batches that contain them get smaller [table]."""
    mixture: dict[str, str] = free(default={})
    """Prepared datasets to mix, name -> URL; a dataset with an empty URL is prepared from ``corpus``. An empty table trains on
    shards.dataset alone [urls]."""
    eval_datasets: dict[str, str] = free(default={})
    """More prepared datasets, name -> URL. The run evaluates on their held-out text, and never trains on them [urls]."""
    weights: tuple[Weights, ...] = ahead(default=())
    """Shares of the mixture as a schedule over steps or tokens; empty weights each corpus by its rows [table]."""
    epoch_caps: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Corpus -> most times that the run may read it. Rows that its weight would draw beyond this cap are drawn from the other
    corpora, in proportion to their weights [epochs]."""
    max_epochs: float = free(default=4.0, gt=0)
    """Most times that the run may read any corpus: a run that would read a corpus more often is refused before it starts. Up to
    4 times, repeated text is nearly as good as new text (Muennighoff et al., 2023) [epochs]."""

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
                    "choose a divisor, or 0 for one lane per row",
                )
            )
        until = 0
        for entry in self.ramp:
            if entry.rows % self.num_lanes or entry.rows > self.global_batch:
                limit = f"must be a multiple of the {self.num_lanes} lanes, and at most stream.global_batch"
                raise ValueError(
                    explain("stream.ramp.rows", entry.rows, limit, "set stream.lanes to a divisor of all batch sizes")
                )
            if entry.until_tokens <= until:
                limit = f"must be more than {until}, where the previous size ends"
                raise ValueError(
                    explain("stream.ramp.until_tokens", int(entry.until_tokens), limit, "sort by until_tokens")
                )
            until = int(entry.until_tokens)
        return self


class FeedConfig(Section):
    """The Ray Data pipeline of each worker."""

    read_bytes: Bytes = free(default=Bytes(4 * 2**20), ge=1)
    """Token bytes that one read task fetches [bytes]."""
    reads_in_flight: int = free(default=2, ge=1)
    """Read tasks that each worker starts ahead of training, so that training rarely waits for data [tasks]."""
    cache: str = free(default="")
    """Folder on each node's local disk in which to cache row groups (blocks of Parquet files) of object storage. They are in
    its subfolder ``springtide-cache-UID``; nothing else in the folder is touched. Empty: the node's temporary folder [name]."""
    cache_bytes: Bytes = free(default=Bytes(32 * 2**30), ge=0)
    """Largest size of a node's cache; 0 caches nothing and reads the store each time [bytes]."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The settings that decide which rows a run trains on, and in which order."""

    stream: StreamConfig
    shards: ShardsConfig
    feed: FeedConfig
    total: int = 0
    """Length of the run, needed to apply stream.epoch_caps; with 0 the caps do not apply [tokens]."""
    labels: str = ""
    """URL of a model's labels (its log-probabilities) for the rows, as objective.labels; empty for none [url]."""

    @property
    def ramp(self) -> Ramp:
        """The number of rows in each step."""
        length, pieces, trained = self.shards.sequence_length, [(0, self.stream.global_batch)], 0
        for entry in self.stream.ramp:
            start = pieces.pop()[0]
            steps = -(-(int(entry.until_tokens) - trained) // (entry.rows * length))
            trained += steps * entry.rows * length
            pieces += [(start, entry.rows), (start + steps, self.stream.global_batch)]
        return Ramp(tuple(pieces))

    @property
    def window(self) -> int:
        """stream.window in whole rows, at least one [rows]."""
        return max(1, int(self.stream.window) // self.shards.sequence_length)

    def steps_to(self, tokens: int) -> StepsDone:
        """Steps until at least ``tokens`` are trained on, if no step is jumped over [steps]."""
        return StepsDone(self.ramp.steps(-(-tokens // self.shards.sequence_length)))


# The number of rows in each step of the order: optionally smaller batches first, then a constant size.


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A schedule of batch sizes, each constant over a range of steps.

    ``pieces``: (from_step, rows) in rising order of steps; the first piece starts at step 0, the last piece never ends.
    """

    pieces: tuple[tuple[int, int], ...]

    def piece(self, step: int) -> int:
        """The index in ``pieces`` of the piece that contains ``step``."""
        return bisect.bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1

    def rows(self, step: int) -> int:
        """The number of rows in ``step``."""
        return self.pieces[self.piece(step)][1]

    def before(self, step: int) -> int:
        """The number of rows in all steps before ``step``."""
        return sum((end - begin) * self.pieces[piece][1] for piece, begin, end in self.runs(0, step))

    def steps(self, rows: int) -> int:
        """The smallest number of steps, from step 0, that together have at least ``rows`` rows."""
        starts = [start for start, _ in self.pieces]
        for (start, size), end in zip(self.pieces, [*starts[1:], None], strict=True):
            needed = start + -(-rows // size)
            if end is None or needed <= end:
                return needed
            rows -= (end - start) * size
        raise AssertionError("the last piece never ends")

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Split the steps [first, last) where the batch size changes: yield (index of the piece, begin, end)."""
        ends = [start for start, _ in self.pieces[1:]] + [last]
        for piece, ((start, _), end) in enumerate(zip(self.pieces, ends, strict=True)):
            begin, end = max(first, start), min(last, end)
            if begin < end:
                yield piece, begin, end
