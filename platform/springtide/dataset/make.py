"""Prepare a dataset: run the stages (parts, segments, plan, shards) in order, then write the manifest, which makes it valid."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import logging
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from springtide.config.code import code_digest
from springtide.config.data import WHOLE, CorpusConfig, ShardsConfig
from springtide.config.renames import as_hashed
from springtide.corpus import (
    Broken,
    CorpusReader,
    Tokenizer,
    changed_files,
    check_byte_counts,
    check_clean,
    checked_text,
    clean,
    open_source,
    open_tokenizer,
    tokenizer_file,
)
from springtide.dataset.apart import SIGNATURES, ApartFrom, names, open_apart
from springtide.dataset.chats import check_chats, check_pairs, only_chats, templates
from springtide.dataset.lost_records import check_lost
from springtide.dataset.near import bands, find_sharing
from springtide.dataset.parts import (
    Part,
    PartJob,
    begin_of_text,
    chat_template,
    find_pieces,
    infilling_of,
    make_part,
    open_work_tokenizer,
    parts_of,
    read_counts,
    shown,
)
from springtide.dataset.plan import check_plan, make_plan
from springtide.dataset.plan_files import Planned, read_plan, write_plan
from springtide.dataset.repeats import buckets, find_repeats
from springtide.dataset.sealing import SealJob, read_records, seal_shards, statistics
from springtide.dataset.segments import Segment, merge, merges
from springtide.errors import ConfigError, CorpusError, explain, redacted
from springtide.shards import (
    CHAT_TEMPLATE,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    ids_of,
    load_manifest,
    most_ids,
    write_manifest,
)
from springtide.storage import Folder, digest

# Types and default functions to run the jobs of a stage and to report progress.

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the number of finished jobs, and the total number of jobs."""

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Function (function, items) -> results. Calls the function on each item, in any process and any order."""


def in_process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Run the function on each item in turn, in this process."""
    return (function(item) for item in items)


def silent(stage: str, done: int, total: int) -> None:
    """Do nothing: the default for callers that show no progress."""


_VERSION = 14
"""Version of the preparation. Increase it when a change of the code makes other bytes of the same settings and files."""

_WORK = "work"
_READ_AT_ONCE = 16
"""Number of record files to read concurrently. A record file lists the shards that one task has written."""
_LEFT_OUT_SHOWN = 20
"""Maximum number of skipped source files that the manifest lists by name."""
_MADE_HERE = ("bpe", "bytes")
"""For these values of ``corpus.tokenizer``, this package makes the tokenizer, so its bytes per token id need no check."""

_log = logging.getLogger(__name__)

_CHECKED, _CHECKED_A_UNIT, _CHECKED_CHARACTERS = 256, 64, 10_000
"""The tokenizer's number of bytes per token id is checked on a sample of text. Limits of the sample: documents in all;
documents per unit (a few source files); characters per document."""


def make_dataset(corpus: CorpusConfig, shards: ShardsConfig, progress: Progress = silent, run: Map = in_process) -> str:
    """Return the URL of the dataset of a corpus. If ``shards.root`` has no dataset for these settings and files, prepare it.

    Resumes the work of a call that was killed. Raises ConfigError or CorpusError if the settings or the corpus cannot be used,
    or if a source file is rewritten or removed during the call.
    """
    sources, apart, texts, dataset = _find(corpus, shards)
    if not dataset.exists(MANIFEST):
        try:
            with explain_full(dataset):
                _make(corpus, shards, sources, apart, texts, dataset, progress, run)
        except FileNotFoundError:
            if not dataset.exists(MANIFEST):  # not an error if another process finished this dataset and removed work/
                raise
    elif dataset.exists(_WORK):  # an earlier call was killed after it wrote the manifest: finish its cleanup
        with contextlib.suppress(OSError):  # the folder may belong to another user: then leave it
            _clear(dataset)
    return dataset.url


def dataset_folder(corpus: CorpusConfig, shards: ShardsConfig) -> Folder:
    """Return the folder of the dataset that ``make_dataset`` makes from these settings. It may not exist yet."""
    return _find(corpus, shards)[3]


def units_to_make(corpus: CorpusConfig, shards: ShardsConfig) -> int:
    """Return how many units (a few source files, or a range of one) ``make_dataset`` would read; 0 if the dataset exists."""
    sources, _, _, dataset = _find(corpus, shards)
    return 0 if dataset.exists(MANIFEST) else sum(len(source.units()) for source in sources)


def _find(corpus: CorpusConfig, shards: ShardsConfig) -> tuple[list[CorpusReader], ApartFrom, dict[str, str], Folder]:
    """Check the settings, and open the files and datasets that they name. Return the sources, the datasets and benchmark texts
    of ``corpus.apart_from``, the texts of the chat templates by name, and the dataset's folder."""
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
        open_source(corpus.path(one.source), one.max_files, one.field, one.separator, is_chat=bool(one.chat_template))
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
    """Return the hash that identifies a dataset, 16 hex digits.

    It covers the settings (without passwords in URLs), size and last change of the source files, ``apart`` (the datasets and
    benchmark texts of ``corpus.apart_from``), the chat templates ``texts``, the code of ``corpus.filter``, the tokenizer file
    and ``_VERSION``. Settings are hashed under the names they had at commit 0ba2dd87 (``config/renames.py``), so that renaming
    a setting changes no hash."""
    sections = {"corpus": corpus.model_dump(mode="json")}
    sections["shards"] = shards.model_dump(mode="json", exclude={"root", "dataset"})
    hashed = as_hashed(sections)
    code = [code_digest({"corpus.filter": corpus.filter})] if corpus.filter else []
    code += [digest.of_bytes(text.encode()) for text in texts.values() if text]
    code += ["whole documents"] if only_chats(texts) else []  # a new hash: older versions laid chats out differently
    if file := tokenizer_file(corpus.path(corpus.tokenizer)):
        code.append(f"tokenizer {digest.of_bytes(Folder(file.parent).read(file.name))}")
    text = json.dumps(
        [
            _VERSION,
            hashed["corpus"],
            hashed["shards"],
            [source.fingerprint() for source in sources],
            apart.fingerprint(),
            *code,
        ],
        sort_keys=True,
        allow_nan=False,
    )
    return hashlib.blake2b(redacted(text).encode(), digest_size=8).hexdigest()


def _part_jobs(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    sources: list[CorpusReader],
    apart: ApartFrom,
    texts: Mapping[str, str],
    work: Folder,
) -> list[PartJob]:
    """Return one job per unit (a few source files, or a range of one). The reader in a job has no list of the source's files,
    so that sending the job to another process is cheap."""
    units = [
        (bare, each, unit, name if corpus.sources else "")
        for source, (name, each) in zip(sources, corpus.each().items(), strict=True)
        for bare in (source.bare(),)
        for unit in source.units()
    ]
    return [
        PartJob(number, *unit, shards, work, apart.datasets, texts[unit[1].chat_template], only_chats(texts))
        for number, unit in enumerate(units)
    ]


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
    check_room(sources, dataset)
    work = dataset / _WORK
    jobs = _part_jobs(corpus, shards, sources, apart, texts, work)
    vocabulary = _vocabulary(corpus, shards, jobs, work)
    tokenizer_digest = digest.of_bytes(vocabulary.to_json().encode())
    apart.check(tokenizer_digest)
    for each in corpus.each().values():
        infilling_of(vocabulary, each, shards)
        if each.chat_template:
            chat_template(vocabulary, each, shards, texts[each.chat_template], only_chats(texts))
    apart.prepare(work)
    if corpus.deduplicate != "documents":
        _run_all(run, find_pieces, jobs, f"finding {corpus.deduplicate}", progress)
        repeats = buckets(work, len(jobs))
        _run_all(run, find_repeats, repeats, "comparing them", progress)
        jobs = [dataclasses.replace(job, buckets=len(repeats)) for job in jobs]
    _run_all(run, make_part, jobs, "reading and tokenising", progress, work)
    counts = read_counts(work, len(jobs))
    parts = [
        part for job, mine in zip(jobs, counts, strict=True) for part in parts_of(job.number, job.group or WHOLE, mine)
    ]
    try:
        remarks = check_lost(corpus, shards, [job.group for job in jobs], counts)
        check_pairs(counts, _named(corpus))
        segments, planned = _planned(corpus, shards, parts, apart, work, progress, run)
    except CorpusError:
        # remove the folder: its name is a hash of settings and files, so a corrected retry uses another folder
        dataset.remove()
        raise
    if cut := planned.plan.cut:
        name = segments[cut.place[0]].file(work, shards.token_type).name_of(cut.place[1])
        remarks.append(f"too few documents to hold out one: the first {cut.tokens:,} tokens of {name} are held out")
    for remark in remarks:
        _log.warning("%s", remark)
    bos_id = begin_of_text(vocabulary, corpus, shards)
    seals = [
        SealJob(number, shards, dataset, work, vocabulary.end_of_text, has_begin=bos_id is not None)
        for number in range(len(planned.bundles))
    ]
    _run_all(run, seal_shards, seals, "packing and sealing", progress, work)
    files = [segment.file(work, shards.token_type) for segment in segments]
    found = statistics(counts, planned.plan, files, vocabulary)
    manifest = Manifest(
        sequence_length=shards.sequence_length,
        token_type=shards.token_type,
        vocab_size=vocabulary.size,
        end_of_text=vocabulary.end_of_text,
        begin_of_text=vocabulary.end_of_text if bos_id is None else bos_id,
        mask_across_documents=shards.mask_across_documents,
        whole_documents=shards.mask_across_documents and only_chats(texts),
        has_loss_mask=bos_id is not None,
        tokenizer_digest=tokenizer_digest,
        fingerprint=dataset.name,
        heldout_fraction=planned.plan.heldout_fraction,
        apart_from=tuple(manifest.digest for manifest in apart.manifests),
        source={"source": _named(corpus), "apart_from": names(apart), "left_out": _left_out(sources), **found},
        sources=_sources(planned, work),
    )
    dataset.write(TOKENIZER, vocabulary.to_json())
    if len(chats := [text for text in texts.values() if text]) == 1:
        dataset.write(CHAT_TEMPLATE, chats[0])
    _check_unchanged(corpus, sources, dataset)
    write_manifest(dataset, manifest)
    _clear(dataset)


def _clear(dataset: Folder) -> None:
    """Remove temporary files and the folder ``work`` from a finished dataset. ``work`` is removed last: if this call is killed,
    the next ``make_dataset`` finds the folder and repeats the cleanup."""
    for folder in (dataset, dataset / SIGNATURES):
        folder.sweep()
    (dataset / _WORK).remove()


def _check_unchanged(corpus: CorpusConfig, sources: Sequence[CorpusReader], dataset: Folder) -> None:
    """If a source file was removed or changed since it was listed, remove the unfinished dataset and raise CorpusError. New
    files are ignored: a later call that includes them makes another dataset."""
    for one, source in zip(corpus.each().values(), sources, strict=True):
        if changed := changed_files(
            corpus.path(one.source), {name: source.seen.get(name) for name in (*source.names, *source.beside)}
        ):
            dataset.remove()
            problem = f"changed while it was read ({len(changed)} such files), and nothing was sealed"
            where = source.folder.where(changed[0])
            raise CorpusError(explain("corpus.source", where, problem, "run the command again when no file changes"))


def _planned(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    parts: Sequence[Part],
    apart: ApartFrom,
    work: Folder,
    progress: Progress,
    run: Map,
) -> tuple[list[Segment], Planned]:
    """Merge all parts (files of prepared documents) into segments (sorted files of about 128 MiB). Then plan the shards, or
    read the plan that an earlier, killed call wrote."""
    merging = merges(work, parts, shards)
    _run_all(run, merge, merging, "sorting", progress, work)
    segments = [job.segment for job in merging]
    if (planned := read_plan(work)) is None:
        if corpus.near_duplicates:
            _run_all(run, find_sharing, bands(work, segments, shards.token_type), "comparing", progress, work)
        may_cut = not (apart.datasets or any(one.fim or one.chat_template for one in corpus.each().values()))
        plan = make_plan(work, segments, shards, corpus.near_duplicates, apart, may_cut)
        check_plan(plan, shards, _named(corpus))
        planned = write_plan(work, plan, segments, shards)
    return segments, planned


def _run_all(
    run: Map,
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    stage: str,
    progress: Progress,
    work: Folder | None = None,
) -> None:
    """Run ``function`` on each job and report progress. If ``work`` is given, skip jobs whose output file exists in it."""
    if work is not None and jobs:
        folder = posixpath.dirname(jobs[0].output)
        made = {posixpath.join(folder, name) for name in (work / folder).names()}
        jobs = [job for job in jobs if job.output not in made]
    for done, _ in enumerate(run(function, jobs), start=1):
        progress(stage, done, len(jobs))


def _named(corpus: CorpusConfig) -> str:
    return ", ".join(redacted(each.source) for each in corpus.each().values())


def _left_out(sources: Sequence[CorpusReader]) -> list[str]:
    """Return the names of the first 20 skipped source files. If there are more, append the number of the rest, "7 more"."""
    found = [shown(name) for source in sources for name in source.left_out]
    more = len(found) - _LEFT_OUT_SHOWN
    return [*found[:_LEFT_OUT_SHOWN], f"{more:,} more"] if more > 0 else found


def _vocabulary(corpus: CorpusConfig, shards: ShardsConfig, jobs: list[PartJob], work: Folder) -> Tokenizer:
    """Return the tokenizer of the dataset. The first call makes or trains it, and stores it in the folder ``work``."""
    if not work.exists(TOKENIZER):
        made = open_tokenizer(
            corpus.path(corpus.tokenizer),
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


def _sources(planned: Planned, work: Folder) -> dict[str, dict[str, Split]]:
    """Return, for the manifest, {name of a source: {name of a split: its counts and its written shards}}."""
    records: dict[tuple[str, str], list[tuple[Shard, int]]] = {}
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        read = threads.map(lambda number: read_records(work, number), range(len(planned.bundles)))
        for (split, _), some in zip(planned.bundles, read, strict=True):
            records.setdefault(split, []).extend(some)
    found: dict[str, dict[str, Split]] = {}
    for one in planned.plan.splits:
        if mine := records.get((one.source, one.split)):
            found.setdefault(one.source, {})[one.split] = Split(
                documents=one.documents,
                tokens=one.tokens,
                num_bytes=sum(num_bytes for _, num_bytes in mine),
                rows=sum(shard.rows for shard, _ in mine),
                shards=tuple(shard for shard, _ in mine),
            )
    return found


def open_dataset(url: str) -> tuple[Manifest, Tokenizer]:
    """Return the manifest and the tokenizer of a finished dataset. Raises CorpusError if the manifest or the tokenizer is
    damaged."""
    dataset = Folder(url)
    manifest, data = load_manifest(dataset), dataset.read(TOKENIZER)
    if (found := digest.of_bytes(data)) != manifest.tokenizer_digest:
        what = f"its bytes changed after sealing; digest expected {manifest.tokenizer_digest}, found {found}"
        raise CorpusError(f"{dataset.where(TOKENIZER)}: {what}; restore the file, or prepare the dataset again")
    where = dataset.where(TOKENIZER)
    return manifest, Tokenizer.from_json(checked_text(data, where), where, manifest.end_of_text)


def rows_text(rows: np.ndarray, vocabulary: Tokenizer) -> Iterator[str]:
    """Decode rows of token ids, (rows, length), and yield the text of each row."""
    return (vocabulary.decode(row.tolist()) for row in ids_of(rows))


# Check the free space of a local disk before anything is written, and explain the error if the disk is full later.

_TIMES = 2.8
"""Disk space that a preparation needs, as a multiple of the text's size. Parts and segments, which are temporary, and shards
all exist until the manifest is written."""


def check_room(sources: Sequence[CorpusReader], dataset: Folder) -> None:
    """Raise CorpusError if a local disk has too little space for the dataset. Files that an earlier, killed call wrote for this
    dataset count as free space, because this call continues with them."""
    root = dataset.path.rsplit("/", 2)[0]
    if not dataset.is_local or not dataset.fs.exists(root):
        return
    size = sum(source.num_bytes() for source in sources)
    free = shutil.disk_usage(root).free
    made = dataset.fs.du(dataset.path) if dataset.exists() else 0
    if free + made < size * _TIMES:
        raise CorpusError(
            explain(
                "shards.root",
                dataset.path.rsplit("/", 1)[0],
                f"has {free / 2**30:.1f} GiB free, but {size / 2**30:.1f} GiB of text need about three times their size",
                "free some, or choose another folder",
            )
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a caller that finds ENOSPC may retry later


@contextlib.contextmanager
def explain_full(dataset: Folder) -> Iterator[None]:
    """Context manager: turn an error of a full disk or a reached quota into a CorpusError with a remedy."""
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
                "free about three times the size of the text and run the same command again: finished work is kept",
            )
        ) from error


# Take a sample of the text of all sources, to train a tokenizer on.

_MOST_UNITS = 1024
"""Maximum number of units from which a sample is taken. A unit is a few source files, or a range of one file. One process opens
and reads all of them."""


def sample(
    seed: int,
    jobs: Sequence[PartJob],
    characters: int,
    *,
    most_units: int = _MOST_UNITS,
    most_a_unit: int | None = None,
) -> Iterator[str]:
    """Yield at most ``characters`` characters of cleaned documents, each distinct text once.

    Each unit (a few source files, or a range of one file) contributes documents from its beginning, in proportion to its bytes.
    If there are more than ``most_units`` units, evenly spaced units are read, at least one per source. Otherwise a corpus of at
    most ``characters`` characters is yielded whole. ``most_a_unit``: maximum number of documents to read from a unit; None for
    no limit.
    """
    rng, seen = np.random.default_rng(seed), set[bytes]()
    chosen = _chosen(rng, jobs, most_units)
    left, left_bytes = characters, sum(num_bytes for _, num_bytes in chosen)
    for index in rng.permutation(len(chosen)).tolist():
        job, num_bytes = chosen[index]
        share = -int(-left * num_bytes // left_bytes)
        left_bytes -= num_bytes
        for found in itertools.islice(job.source.read(job.unit), most_a_unit):
            text = "" if isinstance(found, Broken) else clean(found.text, job.corpus)[0]
            if share <= 0:
                break
            if text and not isinstance(found, Broken) and (digest := found._replace(text=text).digest) not in seen:
                seen.add(digest)
                yield text[:share]
                left, share = left - min(share, len(text)), share - len(text)


def _chosen(rng: np.random.Generator, jobs: Sequence[PartJob], most_units: int) -> list[tuple[PartJob, float]]:
    """Choose the units to read for a sample. Return (job of the unit, bytes of text that it represents). A unit also represents
    its neighbours that are not read."""
    found: list[tuple[PartJob, float]] = []
    for _, group in itertools.groupby(jobs, key=lambda job: id(job.source)):
        units = list(group)
        number = len(units) if len(jobs) <= most_units else max(1, len(units) * most_units // len(jobs))
        apart = len(units) / number
        for place in np.floor((np.arange(number) + rng.random()) * apart).astype(int).tolist():
            found.append((units[place], apart * max(1, units[place].unit.num_bytes)))
    return found
