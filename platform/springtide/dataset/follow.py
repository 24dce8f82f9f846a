"""Datasets of text as it arrives: each batch of new files that are complete becomes one sealed dataset.

    look, and look again -> files that did not change meanwhile -> plan -> dataset -> entry of the index, the plan is removed

A file is complete if its size and its last change are the same at two looks that follow each other; hidden files are never
taken, so a writer that renames its file when it is done is safe at any pace. The plan says which files are in the dataset under
way: after a kill at any moment the next call ends it, so that no file is lost, and none is in two datasets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import open_source
from springtide.dataset.make import dataset_folder, make_dataset
from springtide.dataset.stages import Map, Progress
from springtide.errors import ConfigError, CorpusError, SourceChanged, explain
from springtide.shards import INDEX, TOKENIZER, IndexEntry, append_entry, load_manifest, read_index
from springtide.store import Folder
from springtide.store.errors import as_os_errors, may_pass

_PLAN = "plan.json"
_FILES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])
_MADE_HERE = ("bpe", "bytes")

_log = logging.getLogger(__name__)


class UnfitBatch(CorpusError):
    """A batch of which no dataset can be made: too little text, or a damaged file. Nothing is left of it but its files."""

    files: Mapping[str, str]
    """Name -> size and last change."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later: a store is away for a while, or a disk is full.

    Args:
        error: of a call here, or of ``make_dataset``.

    Examples:
        >>> is_transient(OSError("503 Slow Down")), is_transient(CorpusError("has no text left after cleaning"))
        (True, False)
    """
    if isinstance(error, CorpusError):
        cause = error.__cause__
        # pyarrow raises a plain OSError for bytes that it cannot decode
        is_of_bytes = type(cause) is OSError and cause.errno is None and cause.__cause__ is None
        return cause is not None and not is_of_bytes and is_transient(cause)
    try:
        with as_os_errors(""):
            raise error
    except BaseException as found:
        return may_pass(found)


def check_followed(corpus: CorpusConfig) -> None:
    """Raise ConfigError for a corpus that cannot be followed."""
    if corpus.sources or corpus.source in ("", "stdlib"):
        problem = "is not a folder, glob or URL that text arrives in"
        raise ConfigError(explain("corpus.source", corpus.source, problem, "name one source, and start one per source"))
    if corpus.max_files:
        raise ConfigError(explain("corpus.max_files", corpus.max_files, "leaves files out for good", "set it to 0"))


def new_files(corpus: CorpusConfig, entries: list[IndexEntry]) -> dict[str, str]:
    """Return the files of the source that no entry has: name -> size and last change. One that was taken and has changed
    since is named in a warning, and not taken again."""
    try:
        there = open_source(
            corpus.source, 0, corpus.field, corpus.separator, is_chat=bool(corpus.chat_template)
        ).looks()
    except CorpusError:
        if Folder(corpus.source.partition("*")[0] or ".", is_source=True).exists():
            return {}  # no files yet
        raise
    taken = {name: look for entry in entries for name, look in entry.files.items()}
    if changed := sorted(name for name, look in there.items() if taken.get(name, look) != look):
        _log.warning("%s: changed after it was taken, and is not read again (%d such files)", changed[0], len(changed))
    return {name: look for name, look in there.items() if name not in taken}


def complete(last: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the files that are the same at two looks.

    Examples:
        >>> complete({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
        {'a': '1'}
    """
    return {name: look for name, look in now.items() if last.get(name) == look}


def seal(
    corpus: CorpusConfig,
    shards: ShardsConfig,
    files: Mapping[str, str],
    progress: Progress,
    run: Map,
    listen: Callable[[str], None] = lambda place: None,
) -> IndexEntry | None:
    """End the plan that a killed call has left, or make a dataset of ``files`` and append it to the index below
    ``shards.root``; return its entry. None if there is nothing to do, or the files of the plan have changed meanwhile.

    Args:
        corpus: its ``source`` is the folder, glob or URL that is followed.
        shards: where and how the datasets are written; all have the tokenizer of the first.
        files: as from ``complete``; not read if there is a plan.
        progress: as for ``make_dataset``, and so is ``run``.
        listen: called at the places where a kill matters, by name.

    Raises:
        UnfitBatch: no dataset can be made of them; there is no plan any more.
        CorpusError: the source or the store cannot be reached, and the plan stays.
    """
    root = Folder(shards.root)
    index, entries = root / INDEX, read_index(root)
    plan = index.read_as(_PLAN, _FILES) if index.exists(_PLAN) else {}
    if plan and _unchanged(plan, new_files(corpus, entries)):
        files = plan
    elif plan:  # committed before its plan was removed, or its files are others now
        index.remove(_PLAN)
        return None
    if not files:
        return None
    index.write_json(_PLAN, dict(files))
    listen("planned")
    made: Folder | None = None
    try:
        like = _like_the_first(corpus, root, entries)
        made = dataset_folder(like, shards, frozenset(files))
        made = Folder(make_dataset(like, shards, progress, run, frozenset(files)))
        is_of_them = True
    except SourceChanged:
        is_of_them = False
    except FileNotFoundError:
        if _unchanged(files, new_files(corpus, entries)):
            raise
        is_of_them = False
    except CorpusError as error:
        if made is None or is_transient(error):
            raise
        listen("refused")
        made.remove()  # before the plan, with which a killed call comes here again
        listen("unmade")
        index.remove(_PLAN)
        unfit = UnfitBatch(str(error))
        unfit.files = dict(files)
        raise unfit from error
    listen("made")
    # a file may have changed before it was read, too
    if made is None or not is_of_them or not _unchanged(files, new_files(corpus, entries)):
        if made is not None:
            made.remove()
        index.remove(_PLAN)
        _log.warning("%s: files changed while they were read; they are taken when they are complete", corpus.source)
        return None
    entry = append_entry(root, entries, made.name, load_manifest(made).digest, dict(files))
    listen("appended")
    index.remove(_PLAN)
    return entry


def _unchanged(files: Mapping[str, str], there: Mapping[str, str]) -> bool:
    return all(there.get(name) == look for name, look in files.items())


def _like_the_first(corpus: CorpusConfig, root: Folder, entries: list[IndexEntry]) -> CorpusConfig:
    """Return the corpus of the next dataset: with the first one's tokenizer, and held-out text apart from all before."""
    if not entries:
        return corpus
    made = [f"{root.url}/{entry.dataset}" for entry in entries]
    changes: dict[str, object] = {"apart_from": [*(one.model_dump() for one in corpus.apart_from), *made]}
    if corpus.tokenizer in _MADE_HERE:
        tokenizer = f"{made[0]}/{TOKENIZER}"
        if not Path(tokenizer).is_file():
            problem = f"is made of the first dataset's text, and {root.url} is not a local folder"
            raise ConfigError(explain("corpus.tokenizer", corpus.tokenizer, problem, "name a tokenizer.json"))
        changes |= {"tokenizer": tokenizer, "special_tokens": ()}
    return CorpusConfig.model_validate({**corpus.model_dump(), **changes})
