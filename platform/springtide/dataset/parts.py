"""Turn a unit of a source (a few files, or a range of one) into parts: files of cleaned, hashed and tokenised documents.

    documents  [text] [text] [text]                      of one unit, in file order; each part takes about 64 MiB of text
    parts      key, length, signature, name, tokens      one column file per part (columns.py), rows sorted by key
    counts     documents, characters, tokens             one JSON file per unit, written last: it marks a finished unit

The key is a hash of the text with the seed. Sorting all documents by key shuffles them, and makes equal texts neighbours.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import (
    BANDS,
    BINS,
    UNSPLIT,
    BadChat,
    Broken,
    ChatTemplate,
    CorpusReader,
    Document,
    Infilling,
    Tokenizer,
    Unit,
    check_pieces,
    clean,
    clean_turns,
    exact_signature,
    infill,
    signature,
)
from springtide.dataset.apart import open_exclusions
from springtide.dataset.chats import THOUGHTS_LEFT, laid_out, too_long
from springtide.dataset.columns import ColumnFile, Documents, Layout, Sizes, sizes
from springtide.dataset.lost_records import NOT_UTF_8, lost_of
from springtide.dataset.repeats import Repeats, write_pieces
from springtide.errors import ConfigError, explain, printable, redacted
from springtide.shards import TOKENIZER, masked
from springtide.storage import Folder

_SAMPLES = 5
_IN_LINES = 2
"""Number of broken chats per unit (a few source files) that are reported with their line number. Each costs time: the file is
read up to the line."""
EXAMPLES, EXAMPLE_CHARACTERS = 3, 200
"""Number of dropped documents that the dataset card shows for each reason, and number of characters shown of each document."""
_BEFORE = 40
"""Number of characters that an example of a text with bad bytes shows before the first U+FFFD, which replaces a bad byte."""
_PART_BYTES = 64 * 2**20
"""Size of the text at which a part (a file of prepared documents) is full [bytes]. The process that makes the part holds its
text and its token ids in memory."""
_DOCUMENT_BYTES = 512
"""Memory of a document in addition to its text [bytes]. It is counted because a part may hold millions of short documents."""
_READ_AT_ONCE = 16
"""Number of count files to read concurrently. An object store takes 10 to 100 ms to answer each request."""
_FOLDER = "parts"


class Part(NamedTuple):
    """A file with prepared documents of one unit (a few source files, or a range of one)."""

    unit: int
    place: int
    source: str
    """Name of the source."""
    sizes: Sizes


@dataclasses.dataclass(frozen=True)
class PartJob:
    """Input of ``make_part``, which prepares the documents of one unit (a few source files, or a range of one). Picklable."""

    number: int
    source: CorpusReader
    corpus: CorpusConfig
    """Settings for reading and cleaning this source."""
    unit: Unit
    group: str
    """Name of the source, for the counts of tokens per source. If there is only one source, it is empty, and tokens are counted
    per first folder in the names of documents."""
    shards: ShardsConfig
    work: Folder
    """Temporary folder of the preparation. It holds the parts and the tokenizer, until the dataset is finished."""
    apart_from: tuple[str, ...] = ()
    """URLs of datasets whose held-out text the new dataset must not contain."""
    template: str = ""
    """Text of the chat template; empty for a source of plain texts."""
    whole: bool = False
    """Whether all documents of the dataset are chats. If True, no document is cut between rows."""
    buckets: int = 0
    """Number of files, written by ``repeats.py``, that list repeated lines or paragraphs to remove. If 0, none are removed."""

    def done(self) -> bool:
        """Return True if the documents of the unit (a few source files, or a range of one) were already prepared."""
        return self.work.exists(_counts(self.number))

    @property
    def output(self) -> str:
        """Name of the unit's file of counts: documents kept and dropped, characters, tokens. If it exists, the unit is
        finished, because it is written last."""
        return _counts(self.number)


def _counts(unit: int) -> str:
    return f"{_FOLDER}/{unit:06d}-counts.json"


def part_file(work: Folder, part: Part, token_type: str) -> ColumnFile:
    """Return the file in the folder ``work`` that stores a part."""
    name = f"{_FOLDER}/{part.unit:06d}-{part.place:04d}.columns"
    return ColumnFile(work, name, Layout(part.sizes, token_type, has_bands=False))


def make_part(job: PartJob) -> None:
    """Read, clean, tokenise and write the documents of one unit (a few source files, or a range of one), unless this was
    already done."""
    if job.done():
        return
    vocabulary = open_work_tokenizer(job.work, job.corpus.end_of_text)
    counts: collections.Counter[str] = collections.Counter()
    edits: collections.Counter[str] = collections.Counter()
    samples: list[dict[str, str]] = []
    dropped = _Examples()
    groups: collections.Counter[str] = collections.Counter()
    kept = characters = pairs = ends_inside = 0
    fields: list[str] = []
    parts: list[Sizes] = []
    found = _cleaned(job, vocabulary, counts, edits, samples, dropped, fields)
    for documents in _batches(_unrepeated(job, found, edits, dropped) if job.buckets else found):
        rows = _tokenised(job, documents, vocabulary, dropped, edits)
        if job.template:
            rows = [row for row in rows if not dropped.add(too_long(row["tokens"], job.shards), row["document"])]
        if job.corpus.apart_from:
            rows = [row for row in rows if not dropped.add(_excluded(job, row), row["document"])]
        if job.template:
            ends_inside += sum(bool((row["tokens"][:-1] == vocabulary.end_of_text).any()) for row in rows)
        edits.update(_infill(job, rows, vocabulary))
        _begin_texts(job, rows, vocabulary)
        columns = _encode(rows, job.shards.token_type)
        part = Part(job.number, len(parts), "", sizes(columns))
        part_file(job.work, part, job.shards.token_type).write(columns)
        for row in rows:
            groups[row["group"]] += len(row["tokens"])
            characters += len(row["document"].text)
            pairs += bool(row["document"].rejected)
        kept += len(rows)
        parts.append(part.sizes)
    record = {
        "documents": {**(counts + dropped.counts), "kept": kept},
        "lost": lost_of(counts, dropped.counts),
        "fields": fields,
        "edits": edits,
        "characters": characters,
        "tokens_by_group": groups,
        "broken": samples,
        "examples": dropped.examples,
        "parts": parts,
        "pairs": pairs,
        "ends_inside": ends_inside,
    }
    job.work.write_json(_counts(job.number), record)


def _cleaned(
    job: PartJob,
    vocabulary: Tokenizer,
    counts: collections.Counter[str],
    edits: collections.Counter[str],
    samples: list[dict[str, str]],
    dropped: _Examples,
    fields: list[str],
) -> Iterator[Document]:
    """Yield the documents of the job's unit that cleaning keeps.

    Adds to the collections that the caller passes. ``counts``: reason -> number of broken records; ``samples``: a few broken
    records; ``dropped``: documents that cleaning drops; ``edits``: kind of change -> number of changes; ``fields``: field names
    of the first record without text."""
    for found in job.source.read(job.unit, vocabulary):
        if isinstance(found, Broken):
            counts[found.reason] += 1
            if len(samples) < _SAMPLES:
                name = job.source.line_of(found.name) if job.source.is_chat and len(samples) < _IN_LINES else found.name
                samples.append({"name": shown(name), "reason": found.reason, "sample": found.sample})
            fields += found.fields if not fields else ()
            continue
        text, reason, edited = clean(found.text, job.corpus)
        if not dropped.add(reason, found):
            edits.update(edited)
            if "\ufffd" in found.text and found.ids is None:
                edits[NOT_UTF_8] += 1
                dropped.show(NOT_UTF_8, found.name, found.text[max(0, found.text.index("\ufffd") - _BEFORE) :])
            turns, rejected = (clean_turns(one, job.corpus) for one in (found.turns, found.rejected))
            yield found._replace(text=text, ids=None if edited else found.ids, turns=turns, rejected=rejected)


def find_pieces(job: PartJob) -> None:
    """Write the hashes of all lines or paragraphs of one unit. ``find_repeats`` then compares the hashes of all units."""
    vocabulary = open_work_tokenizer(job.work, job.corpus.end_of_text)
    counts, edits = collections.Counter[str](), collections.Counter[str]()
    documents = _cleaned(job, vocabulary, counts, edits, [], _Examples(), [])
    write_pieces(job.work, job.number, (document.text for document in documents), job.corpus.deduplicate)


def _unrepeated(
    job: PartJob, documents: Iterable[Document], edits: collections.Counter[str], dropped: _Examples
) -> Iterator[Document]:
    """Yield the documents without the lines or paragraphs that occurred earlier in the corpus. Add the number of removed pieces
    to ``edits``. If nothing of a document is left, add it to ``dropped``."""
    kind, repeats = job.corpus.deduplicate, Repeats(job.work, job.number, job.corpus.deduplicate, job.buckets)
    for document in documents:
        text, removed = repeats.remove(document.text)
        for piece in removed:
            dropped.show(f"repeated {kind}", document.name, piece)
        edits[f"repeated {kind}"] += len(removed)
        if not text.strip():
            dropped.add(f"nothing but repeated {kind}", document)
        else:
            yield document._replace(text=text, ids=None) if removed else document


def _excluded(job: PartJob, row: dict[str, Any]) -> str:
    """Return the reason to drop a document that resembles held-out text of another dataset in ``corpus.apart_from``, or quotes
    a benchmark. Return "" to keep the document."""
    return open_exclusions(job.work, job.apart_from).reason(row["document"].text, row["tokens"], row["bands"])


class _Examples:
    """Counts dropped documents by reason, and keeps the first three documents of each reason as examples."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: list[dict[str, str]] = []
        self._shown: collections.Counter[str] = collections.Counter()

    def add(self, reason: str, document: Document) -> bool:
        """Count a document as dropped for ``reason``, and return True. If ``reason`` is empty, count nothing and return
        False."""
        if not reason:
            return False
        self.counts[reason] += 1
        self.show(reason, document.name, document.text)
        return True

    def show(self, reason: str, name: str, text: str) -> None:
        """Keep the beginning of a text as an example of ``reason``. If ``reason`` has three examples already, keep nothing."""
        self._shown[reason] += 1
        if self._shown[reason] <= EXAMPLES:
            self.examples.append({"reason": reason, "name": shown(name), "sample": text[:EXAMPLE_CHARACTERS]})


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group the documents of a unit into lists of about 64 MiB of text, one per part. Most units have one part; a large
    compressed file is one unit with many parts. A unit without documents has one empty part."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        if held >= _PART_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(document)
        held += _DOCUMENT_BYTES + (len(document.text) if document.text.isascii() else len(document.text.encode()))
    yield batch


def _tokenised(
    job: PartJob,
    documents: list[Document],
    vocabulary: Tokenizer,
    dropped: _Examples,
    edits: collections.Counter[str],
) -> list[dict[str, Any]]:
    """Tokenise and hash the documents of a part. Return one dict per document, sorted by key (a hash of its text).

    Adds documents that cannot be tokenised to ``dropped``. Adds to ``edits`` the number of answers whose reasoning the chat
    template leaves out."""
    key = job.shards.seed.to_bytes(8, "little")
    rows: list[dict[str, Any]] = []
    encoded: Iterator[tuple[np.ndarray | None, np.ndarray | None]]
    if job.template:
        template = chat_template(vocabulary, job.corpus, job.shards, job.template, job.whole)
        encoded = _laid_out(documents, template, dropped)
    else:
        encoded = _encoded(documents, vocabulary, job)
    for document, (ids, is_predicted) in zip(documents, encoded, strict=True):
        if ids is None:
            if not job.template:  # _laid_out has already added a bad chat to ``dropped``
                dropped.add(f"{UNSPLIT} it", document)
            continue
        place = hashlib.blake2b(document.digest, key=key, digest_size=16).digest()
        share = int.from_bytes(document.digest[:8], "little")
        group = job.group or _first_folder(document.name)
        row = {"document": document, "place": place, "share": share, "group": group, "tokens": ids}
        found = exact_signature(document.digest) if job.template else signature(ids)
        rows.append({**row, "is_predicted": is_predicted, **found._asdict()})
    if job.template and template.thoughts_left:
        edits[THOUGHTS_LEFT] += template.thoughts_left
    rows.sort(key=lambda row: row["place"])
    return rows


def _laid_out(
    documents: list[Document], template: ChatTemplate, dropped: _Examples
) -> Iterator[tuple[np.ndarray | None, np.ndarray | None]]:
    """Yield for each chat its token ids and a mask of the ids that are predicted. If the template cannot render a chat, yield
    (None, None), and add the chat to ``dropped``."""
    for document, found in zip(documents, laid_out(documents, template), strict=True):
        if isinstance(found, BadChat):
            dropped.add(found.reason, document._replace(text=f"{found.problem}; {found.remedy}"))
            yield None, None
        else:
            yield found[0], found[1]


def chat_template(
    vocabulary: Tokenizer, corpus: CorpusConfig, shards: ShardsConfig, text: str, whole: bool
) -> ChatTemplate:
    """Compile ``text``, the chat template of a source. ``whole``: whether all documents of the dataset are chats, so that none
    is cut between rows. Raises ConfigError if the tokenizer lacks a special token of the template."""
    return ChatTemplate(corpus.chat_template, text, vocabulary, begin_of_text(vocabulary, corpus, shards), whole)


def _encoded(
    documents: list[Document], vocabulary: Tokenizer, job: PartJob
) -> Iterator[tuple[np.ndarray | None, np.ndarray | None]]:
    """Yield (token ids, None) for each document; None means that all ids are predicted. Ids end with end-of-document.

    If the source stores token ids, use these ids, without a begin-of-text id at their start, because ``_begin_texts`` adds it
    later. Encode the text of any other document. If the tokenizer cannot encode a text, yield (None, None)."""
    end, tokenizer = np.array([vocabulary.end_of_text], dtype=np.uint32), job.corpus.tokenizer
    bos_id = begin_of_text(vocabulary, job.corpus, job.shards)
    encoded = vocabulary.try_encode(document.text for document in documents if document.ids is None)
    for document in documents:
        if document.ids is None:
            yield next(encoded), None
            continue
        if tokenizer == "bpe":
            limit, remedy = f"is trained here, {shown(document.name)} came as token ids", "name the one that made them"
            raise ConfigError(explain("corpus.tokenizer", tokenizer, limit, remedy))
        has_begin = len(document.ids) > 0 and document.ids[0] == bos_id
        yield np.concatenate([document.ids[has_begin:], end]), None


def _infill(job: PartJob, rows: list[dict[str, Any]], vocabulary: Tokenizer) -> dict[str, int]:
    """Rearrange documents in ``rows`` for fill-in-the-middle training, which teaches a model to write the text between two
    given texts. Documents that may be held out stay unchanged. A rearranged document is divided into segments; two segments are
    separated by the same ids as two documents. Return {kind of change: number of rearranged documents}."""
    if (infilling := infilling_of(vocabulary, job.corpus, job.shards)) is None:
        return {}
    trained = [row for row in rows if row["share"] / 2.0**64 >= job.shards.heldout_fraction]
    documents, bos_id = [row["document"] for row in trained], begin_of_text(vocabulary, job.corpus, job.shards)
    between = np.array([vocabulary.end_of_text], dtype=job.shards.token_type)
    if bos_id is not None:
        between = np.append(between, masked(np.array([bos_id], dtype=job.shards.token_type)))
    changed = 0
    found = infill(documents, (len(row["tokens"]) - 1 for row in trained), vocabulary, infilling)
    for row, segments in zip(trained, found, strict=True):
        if segments is not None:
            pieces = [piece for segment in segments for piece in (segment.astype(job.shards.token_type), between)]
            row["tokens"] = np.concatenate([*pieces[:-1], between[:1]])
            changed += 1
    return {"fill in the middle: documents": changed} if changed else {}


def infilling_of(vocabulary: Tokenizer, corpus: CorpusConfig, shards: ShardsConfig) -> Infilling | None:
    """Return the fill-in-the-middle parameters of a source, or None if ``corpus.fim`` is off or all text is held out. Raises
    ConfigError if the tokenizer lacks a token of ``corpus.fim_tokens``, or changes a text that is encoded in pieces."""
    if not corpus.fim or shards.heldout_fraction == 1:
        return None
    check_pieces(vocabulary, "corpus.fim", corpus.fim)
    prefix_id, suffix_id, middle_id = (vocabulary.id_of(name, "corpus.fim_tokens") for name in corpus.fim_tokens)
    return Infilling(corpus.fim, prefix_id, suffix_id, middle_id, shards.sequence_length, shards.seed)


def _begin_texts(job: PartJob, rows: list[dict[str, Any]], vocabulary: Tokenizer) -> None:
    """If the dataset has a begin-of-text id, put it before the ids of each document, and mark the ids that are not
    predicted."""
    if (bos_id := begin_of_text(vocabulary, job.corpus, job.shards)) is not None:
        first = masked(np.array([bos_id], dtype=job.shards.token_type))
        for row in rows:
            tokens = row["tokens"].astype(job.shards.token_type)
            if row["is_predicted"] is not None:
                tokens = np.where(row["is_predicted"], tokens, masked(tokens))
            row["tokens"] = np.concatenate([first, tokens])


def _first_folder(name: str) -> str:
    """Return the first folder in a document's name, such as ``a`` for ``a/b.jsonl@7``. For a name without a folder, return the
    file name."""
    return shown(name).split("/")[0].split("@")[0]


def shown(name: str) -> str:
    """Return a file name for the manifest and the dataset card, without control characters and secrets: a file name may hold
    any bytes, and a URL may end in a secret signature."""
    return printable(redacted(name))


@functools.lru_cache(maxsize=1)
def open_work_tokenizer(work: Folder, end_of_text: str | int) -> Tokenizer:
    """Return the tokenizer that is stored in ``work``, the temporary folder of a dataset in preparation. Cached, because one
    process makes many parts."""
    return Tokenizer.from_json(work.read(TOKENIZER).decode(), end_of_text=end_of_text)


def begin_of_text(vocabulary: Tokenizer, corpus: CorpusConfig, shards: ShardsConfig) -> int | None:
    """Return the begin-of-text id, which stands before each document and is not predicted; None if the dataset has none."""
    if corpus.begin_of_text:
        return vocabulary.id_of(corpus.begin_of_text, "corpus.begin_of_text")
    return vocabulary.end_of_text if shards.mask_across_documents else None


def _encode(rows: list[dict[str, Any]], token_type: str) -> Documents:
    """Convert the documents of a part, one dict each, to columns: one array per field of a document."""
    places = np.frombuffer(b"".join(row["place"] for row in rows), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    names = [shown(row["document"].name).encode() for row in rows]
    return {
        "high": places[:, 0],
        "low": places[:, 1],
        "share": np.array([row["share"] for row in rows], dtype=np.uint64),
        # int32 is enough: sources.py and documents.py limit the length of a document
        "length": np.array([len(row["tokens"]) for row in rows], dtype=np.int32),
        "sketch": np.array([row["sketch"] for row in rows], dtype=np.uint8).reshape(-1, BINS),
        "signature": np.array([row["bands"] for row in rows], dtype=np.uint64).reshape(-1, BANDS),
        "tokens": np.concatenate([row["tokens"] for row in rows] or [np.empty(0)]).astype(token_type),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "names": np.frombuffer(b"".join(names), np.uint8),
    }


def read_counts(work: Folder, units: int) -> list[dict[str, Any]]:
    """Return for each unit (a few source files, or a range of one) the counts that ``make_part`` wrote: documents kept and
    dropped by reason, characters, tokens by source or folder, examples of broken records, field names of the first record
    without text, and the sizes of its parts."""
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        return list(threads.map(lambda unit: dict(work.read_json(_counts(unit))), range(units)))


def parts_of(unit: int, source: str, counts: dict[str, Any]) -> list[Part]:
    """Return the parts (files of prepared documents) of a unit. ``counts``, from ``read_counts``, has their sizes."""
    return [Part(unit, place, source, Sizes(*one)) for place, one in enumerate(counts["parts"])]
