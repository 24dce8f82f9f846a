"""Run the stages in order and write the dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.config.code import code_digest
from springtide.config.data import WHOLE, CorpusConfig, ShardsConfig
from springtide.corpus import (
    BANDS,
    CorpusReader,
    Tokenizer,
    check_byte_counts,
    check_clean,
    open_source,
    open_tokenizer,
)
from springtide.dataset.apart import ApartFrom, names, open_apart
from springtide.dataset.chats import check_chats, check_pairs, templates
from springtide.dataset.parts import (
    PartJob,
    begin_of_text,
    chat_template,
    find_pieces,
    infilling_of,
    make_part,
    open_work_tokenizer,
    part_numbers,
    read_counts,
    read_documents,
)
from springtide.dataset.plan import Plan, ShardPlan, check_plan, make_plan
from springtide.dataset.repeats import buckets, find_repeats
from springtide.dataset.sample import sample
from springtide.dataset.signatures import SIGNATURES, write_signatures
from springtide.dataset.stages import Map, Progress, in_process, silent
from springtide.dataset.statistics import statistics
from springtide.errors import ConfigError, CorpusError, explain, redacted
from springtide.shards import (
    CHAT_TEMPLATE,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    ids_of,
    is_predicted,
    load_manifest,
    masked,
    memory_type,
    most_ids,
    write_manifest,
    write_shard,
)
from springtide.store import Folder, digest

_VERSION = 13
"""Increase it when the same settings produce other bytes."""

_WORK = "work"
_MADE_HERE = ("bpe", "bytes")
"""Tokenizers with byte counts that are correct by construction."""

_CHECKED, _CHECKED_A_UNIT, _CHECKED_CHARACTERS = 256, 64, 10_000
"""Documents in all, documents per unit, and characters per document on which a tokenizer's byte counts are checked."""


def make_dataset(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    progress: Progress = silent,
    run: Map = in_process,
    only: frozenset[str] = frozenset(),
) -> str:
    """Find the dataset of a corpus by its fingerprint, or make it below ``shards.root``; returns its URL. ``only``: the files
    of the source that it is made of; empty for all.

    Resumes a call that was killed. ConfigError or CorpusError if the settings or the corpus cannot be used.
    """
    sources, apart, texts, dataset = _find(corpus, shards, only)
    if not dataset.exists(MANIFEST):
        try:
            with _explained(dataset):
                _make(corpus, shards, sources, apart, texts, dataset, progress, run)
        except FileNotFoundError:
            if not dataset.exists(MANIFEST):  # else another process made the same dataset and removed the work folder
                raise
    return dataset.url


def units_to_make(corpus: CorpusConfig, shards: ShardsConfig) -> int:
    """Return the number of units that ``make_dataset`` would read; 0 if the dataset exists."""
    sources, _, _, dataset = _find(corpus, shards)
    return 0 if dataset.exists(MANIFEST) else sum(len(source.units()) for source in sources)


def _find(
    corpus: CorpusConfig, shards: ShardsConfig, only: frozenset[str] = frozenset()
) -> tuple[list[CorpusReader], ApartFrom, dict[str, str], Folder]:
    """Return the sources, what they stay apart from, their chat templates, and the folder of their dataset."""
    if not corpus.source and not corpus.sources:
        limit = "names no text, and this recipe has none of its own"
        made = f" and its tokenizer with corpus.tokenizer (else a BPE of {corpus.vocab_size:,} ids is trained on it)"
        made = made if corpus.tokenizer == "bpe" else ""
        remedy = f"name your text with corpus.source or corpus.sources{made}, or a prepared dataset with shards.dataset"
        raise ConfigError(explain("corpus.source", corpus.source, limit, remedy))
    each = corpus.each().values()
    for one in each:
        check_clean(one)
    texts = templates(corpus)
    check_chats(texts, shards)
    sources = [
        open_source(one.source, one.max_files, one.field, one.separator, is_chat=bool(one.chat_template)).only(only)
        for one in each
    ]
    apart = open_apart(corpus)
    return sources, apart, texts, Folder(shards.root) / fingerprint(corpus, shards, sources, apart, texts)


def fingerprint(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    sources: Sequence[CorpusReader],
    apart: ApartFrom,
    texts: Mapping[str, str],
) -> str:
    """Hash the settings but passwords in URLs, the sources' files, what they stay apart from, the ``texts`` of their chat
    templates and ``_VERSION``: 16 hex digits."""
    settings = [corpus.model_dump(mode="json"), shards.model_dump(mode="json", exclude={"root", "dataset"})]
    code = [code_digest(corpus.filter)] if corpus.filter else []
    code += [digest.of_bytes(text.encode()) for text in texts.values() if text]
    text = json.dumps(
        [
            _VERSION,
            *settings,
            [source.fingerprint() for source in sources],
            apart.fingerprint(),
            *code,
        ],
        sort_keys=True,
        allow_nan=False,
    )
    return hashlib.blake2b(redacted(text).encode(), digest_size=8).hexdigest()


def _make(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    sources: list[CorpusReader],
    apart: ApartFrom,
    texts: Mapping[str, str],
    dataset: Folder,
    progress: Progress,
    run: Map,
) -> None:
    _check_room(sources, dataset)
    work = dataset / _WORK
    units = [
        (source, each, unit, name if corpus.sources else "")
        for source, (name, each) in zip(sources, corpus.each().items(), strict=True)
        for unit in source.units()
    ]
    jobs = [
        PartJob(number, *unit, shards, work, apart.datasets, texts[unit[1].chat_template])
        for number, unit in enumerate(units)
    ]
    vocabulary = _vocabulary(corpus, shards, jobs, work)
    tokenizer_digest = digest.of_bytes(vocabulary.to_json().encode())
    apart.check(tokenizer_digest)
    for each in corpus.each().values():
        infilling_of(vocabulary, each, shards)
        if each.chat_template:
            chat_template(vocabulary, each, shards, texts[each.chat_template])
    apart.prepare(work)
    if corpus.deduplicate != "documents":
        _run_all(run, find_pieces, jobs, f"finding {corpus.deduplicate}", progress)
        repeats = buckets(work, len(jobs))
        _run_all(run, find_repeats, repeats, "comparing them", progress)
        jobs = [dataclasses.replace(job, buckets=len(repeats)) for job in jobs]
    _run_all(run, make_part, [job for job in jobs if not job.done()], "reading and tokenising", progress)
    counts = [read_counts(work, unit) for unit in range(len(jobs))]
    check_pairs(counts, _named(corpus))
    parts = {part: jobs[unit].group or WHOLE for unit, mine in enumerate(counts) for part in part_numbers(unit, mine)}
    plan = make_plan(work, list(parts), list(parts.values()), shards, corpus.near_duplicates, apart)
    check_plan(plan, shards, _named(corpus))
    bos_id = begin_of_text(vocabulary, corpus, shards)
    seals = [
        SealJob(shard, shards, dataset, work, vocabulary.end_of_text, has_begin=bos_id is not None)
        for split in plan.splits
        for shard in split.shards
    ]
    _run_all(run, seal_shard, [job for job in seals if not job.done()], "packing and sealing", progress)
    manifest = Manifest(
        sequence_length=shards.sequence_length,
        token_type=shards.token_type,
        vocab_size=vocabulary.size,
        end_of_text=vocabulary.end_of_text,
        begin_of_text=vocabulary.end_of_text if bos_id is None else bos_id,
        mask_across_documents=shards.mask_across_documents,
        has_loss_mask=bos_id is not None,
        tokenizer_digest=tokenizer_digest,
        fingerprint=dataset.name,
        heldout_fraction=plan.heldout_fraction,
        apart_from=tuple(manifest.digest for manifest in apart.manifests),
        source={"source": _named(corpus), "apart_from": names(apart), **statistics(counts, plan, work, vocabulary)},
        sources=_sources(plan, {job.shard.name: job for job in seals}),
    )
    dataset.write(TOKENIZER, vocabulary.to_json())
    if len(chats := [text for text in texts.values() if text]) == 1:
        dataset.write(CHAT_TEMPLATE, chats[0])
    write_manifest(dataset, manifest)
    work.remove()
    for folder in (dataset, dataset / SIGNATURES):
        folder.sweep()


@dataclasses.dataclass(frozen=True)
class SealJob:
    """The input to make one shard. Picklable."""

    shard: ShardPlan
    settings: ShardsConfig
    dataset: Folder
    work: Folder
    end_of_text: int
    has_begin: bool
    """Whether each document begins with a begin-of-text, which is not of its text."""

    @property
    def record(self) -> str:
        return f"shards/{self.shard.name}.json"

    def done(self) -> bool:
        """Return whether the shard was already made."""
        return self.work.exists(self.record)


def seal_shard(job: SealJob) -> None:
    """Gather the shard's tokens from the parts, pack them and write the shard, unless it was already made."""
    if job.done():
        return
    plan, length = job.shard, job.settings.sequence_length
    documents: list[np.ndarray] = [np.empty(0)] * len(plan.parts)
    bands = np.empty((len(plan.parts), BANDS), dtype=np.uint64)
    for part in np.unique(plan.parts).tolist():
        mine = np.flatnonzero(plan.parts == part)  # parts have the dataset's order, so these rows rise
        found, bands[mine] = read_documents(job.work, part, plan.places[mine])
        for place, tokens in zip(mine.tolist(), found, strict=True):
            documents[place] = tokens
    if plan.pieces is None:
        line = np.concatenate(documents)[plan.skip :]
        rows = np.lib.stride_tricks.sliding_window_view(line, length + 1)[: plan.rows * length : length]
    else:
        rows = _fill(documents, plan.pieces, plan.rows, length + 1, job.end_of_text)
    lengths = open_work_tokenizer(job.work, job.end_of_text).byte_lengths()
    wide = memory_type(job.settings.token_type, len(lengths))
    num_bytes = np.array([_num_bytes(row[1:].astype(wide, copy=False), lengths) for row in rows], dtype=np.int64)
    shard = write_shard(job.dataset, plan.name, job.settings, plan.first_row, num_bytes, rows)
    texts = [ids_of(document[1:]) for document in documents] if job.has_begin else documents
    shard = write_signatures(job.dataset, shard, plan.split, bands, texts)
    job.work.write_json(job.record, {"shard": shard.model_dump(mode="json"), "num_bytes": int(num_bytes.sum())})


def _fill(documents: list[np.ndarray], pieces: np.ndarray, rows: int, capacity: int, padding: int) -> np.ndarray:
    """Return the rows of a shard with fitted pieces, (rows, capacity); ``padding`` fills the rest of each row. The first
    token of a piece is not predicted: it is a begin-of-text, or the last token of the piece before it."""
    found = masked(np.full((rows, capacity), padding, dtype=documents[0].dtype))
    filled = np.zeros(rows, dtype=np.int64)
    for row, document, begin, end in pieces.tolist():
        at = filled[row]
        found[row, at : at + end - begin] = documents[document][begin:end]
        found[row, at : at + 1] = masked(found[row, at : at + 1])
        filled[row] += end - begin
    return found


def _num_bytes(row: np.ndarray, lengths: np.ndarray) -> int:
    """Return the bytes of text that the predicted tokens of ``row`` stand for."""
    return int(lengths[row[is_predicted(row)]].sum())


def _run_all(run: Map, function: Callable[[Any], Any], jobs: Sequence[Any], stage: str, progress: Progress) -> None:
    for done, _ in enumerate(run(function, jobs), start=1):
        progress(stage, done, len(jobs))


def _named(corpus: CorpusConfig) -> str:
    return ", ".join(redacted(each.source) for each in corpus.each().values())


def _vocabulary(corpus: CorpusConfig, shards: ShardsConfig, jobs: list[PartJob], work: Folder) -> Tokenizer:
    """Return the tokenizer, made once."""
    if not work.exists(TOKENIZER):
        made = open_tokenizer(
            corpus.tokenizer,
            sample(shards.seed, jobs, corpus.tokenizer_characters),
            corpus.vocab_size,
            pattern=corpus.pretokenizer,
            end_of_text=corpus.end_of_text,
            special_tokens=corpus.named_tokens,
        )
        _check_room_for_ids(made, corpus, shards)
        if corpus.tokenizer not in _MADE_HERE:
            texts = sample(shards.seed, jobs, corpus.tokenizer_characters, most_a_unit=_CHECKED_A_UNIT)
            checked = (text[:_CHECKED_CHARACTERS] for text in itertools.islice(texts, _CHECKED))
            check_byte_counts(made, corpus.tokenizer, checked)
        work.write(TOKENIZER, made.to_json())
    return open_work_tokenizer(work, corpus.end_of_text)


def _check_room_for_ids(made: Tokenizer, corpus: CorpusConfig, shards: ShardsConfig) -> None:
    has_loss_mask = begin_of_text(made, corpus, shards) is not None
    if made.size > (limit := most_ids(shards.token_type, has_loss_mask)):
        holds = f"holds {limit} ids and which tokens are not predicted" if has_loss_mask else f"holds {limit} ids"
        problem = f"{holds}, the tokenizer {corpus.tokenizer!r} has {made.size}"
        raise ConfigError(explain("shards.token_type", shards.token_type, problem, "set shards.token_type to uint32"))


def _sources(plan: Plan, jobs: Mapping[str, SealJob]) -> dict[str, dict[str, Split]]:
    """Return the splits of each source. ``jobs``: of the shards, by their names."""
    found: dict[str, dict[str, Split]] = {}
    for one in plan.splits:
        if one.shards:
            records = [jobs[shard.name].work.read_json(jobs[shard.name].record) for shard in one.shards]
            shards = tuple(Shard.model_validate(record["shard"]) for record in records)
            found.setdefault(one.source, {})[one.split] = Split(
                documents=one.documents,
                tokens=one.tokens,
                num_bytes=sum(record["num_bytes"] for record in records),
                rows=sum(shard.rows for shard in shards),
                shards=shards,
            )
    return found


def _check_room(sources: list[CorpusReader], dataset: Folder) -> None:
    """Raise CorpusError if a local disk is too small for the dataset, before anything is written."""
    if not dataset.is_local or not dataset.fs.exists(dataset.path.rsplit("/", 2)[0]):
        return
    size = sum(source.folder.size(name) for source in sources for name in (*source.names, *source.beside))
    free = shutil.disk_usage(dataset.path.rsplit("/", 2)[0]).free
    if free < size * 2:
        raise CorpusError(
            explain(
                "shards.root",
                dataset.path.rsplit("/", 1)[0],
                f"has {free / 2**30:.1f} GiB free, preparing {size / 2**30:.1f} GiB of text takes about twice that",
                "free some, or choose another folder",
            )
        )


@contextlib.contextmanager
def _explained(dataset: Folder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CorpusError(
            explain(
                "shards.root",
                dataset.url,
                f"the disk is full ({error})",
                "free about twice the size of the text and run the same command again: finished work is kept",
            )
        ) from error


def open_dataset(url: str) -> tuple[Manifest, Tokenizer]:
    """Return the manifest and tokenizer of a sealed dataset; CorpusError if either cannot be used."""
    dataset = Folder(url)
    manifest, data = load_manifest(dataset), dataset.read(TOKENIZER)
    if (found := digest.of_bytes(data)) != manifest.tokenizer_digest:
        what = f"its bytes changed after sealing; digest expected {manifest.tokenizer_digest}, found {found}"
        raise CorpusError(f"{dataset.where(TOKENIZER)}: {what}; restore the file, or prepare the dataset again")
    return manifest, Tokenizer.from_json(
        data.decode("utf-8", "replace"), dataset.where(TOKENIZER), manifest.end_of_text
    )


def rows_text(rows: np.ndarray, vocabulary: Tokenizer) -> Iterator[str]:
    """Yield rows of tokens, (rows, length), as text."""
    return (vocabulary.decode(row.tolist()) for row in ids_of(rows))
