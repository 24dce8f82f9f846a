"""``springtide data prepare --follow``: one sealed dataset after another, as text arrives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from springtide.app.prepare import write_card
from springtide.config import Config, Seconds
from springtide.dataset import (
    Progress,
    UnfitBatch,
    check_followed,
    complete,
    in_process,
    is_transient,
    new_files,
    seal,
    silent,
)
from springtide.errors import ConfigError, explain, redacted
from springtide.shards import IndexEntry, read_index
from springtide.store import Folder

_SHOWN = 5
"""Names of files in a warning."""

_log = logging.getLogger(__name__)


def follow(
    config: Config,
    every_s: float = 30.0,
    at_least_bytes: int = 2**20,
    once: bool = False,
    progress: Progress | None = None,
    wait: Callable[[float], None] = time.sleep,
    listen: Callable[[str], None] = lambda place: None,
) -> Iterator[IndexEntry]:
    """Make a sealed dataset of each batch of new files of ``corpus.source``, below ``shards.root``, and yield its entry in the
    index there.

    Args:
        config: settings; ``corpus`` and ``shards`` decide what the datasets hold. All have the tokenizer of the first.
        every_s: time between two looks [s]. A file is taken if its size and its last change are the same at both.
        at_least_bytes: complete files wait for others until they have this number of bytes together [bytes].
        once: end after two looks, and a batch if there is one; otherwise go on for ever.
        progress: as for ``prepare``.
        wait: sleeps between two looks.
        listen: called at the places where a kill matters, by name.

    A batch of which nothing can be sealed, of too little text or with a damaged file, is named in a warning. It is tried again
    together with files that come later; if that fails too, they are sealed without it.

    Raises:
        ConfigError: a setting cannot work.
        CorpusError: the source cannot be reached. With ``once``: or a file is damaged, or there is too little text for one row;
            the next call takes these files, too.
        OSError: of a store, with ``once``, or if it does not pass by itself. Others are warned of, and tried again.
    """
    check_followed(config.corpus)
    if not once and not 0 < every_s <= Seconds.most:
        problem = f"must be more than 0 and at most {Seconds.most:.0f} s"
        raise ConfigError(explain("every", every_s, problem, "give the time between two looks"))
    batches = _Batches(config, at_least_bytes, progress or silent, listen)
    made: IndexEntry | None = None
    looks, is_away = 0, False
    while True:
        try:
            if made is None:
                made, looks = batches.next(), looks + 1
            if made is not None:
                write_card(f"{Folder(config.shards.root).url}/{made.dataset}")
        except Exception as error:
            if once or not is_transient(error):
                raise
            if not is_away:
                text = f"{type(error).__name__}: {error}"
                _log.warning("%s: %s; tried again every %g s", redacted(config.corpus.source), redacted(text), every_s)
            is_away = True
        else:
            is_away = False
            if made is not None:
                yield made
                made = None
            if once and looks > 1:
                if batches.failed is not None:
                    raise batches.failed
                return
        wait(every_s)


class _Batches:
    """The batches of files that are complete."""

    def __init__(self, config: Config, at_least_bytes: int, progress: Progress, listen: Callable[[str], None]) -> None:
        self._corpus, self._shards, self._least = config.corpus, config.shards, at_least_bytes
        self._progress, self._listen = progress, listen
        self._last: dict[str, str] = {}
        self._aside: dict[str, str] = {}
        """Files of which nothing could be sealed."""
        self.failed: UnfitBatch | None = None
        """The batch that was refused last, unless one with its files was sealed since."""

    def next(self) -> IndexEntry | None:
        """Look at the source; make a dataset of a batch if there is one, and return its entry."""
        entry = self._seal({})  # what a killed call has left
        now = new_files(self._corpus, read_index(Folder(self._shards.root)))
        files, self._last = complete(self._last, now), now
        self._aside = {name: look for name, look in self._aside.items() if now.get(name) == look}
        fresh = {name: look for name, look in files.items() if self._aside.get(name) != look}
        if entry is None and fresh and sum(int(look.partition(" ")[0]) for look in fresh.values()) >= self._least:
            entry = self._seal(files)
            if entry is None and len(fresh) < len(files) and fresh.items() <= self._aside.items():
                entry = self._seal(fresh)
        return entry

    def _seal(self, files: dict[str, str]) -> IndexEntry | None:
        try:
            entry = seal(self._corpus, self._shards, files, self._progress, in_process, self._listen)
        except UnfitBatch as error:
            self._aside, self.failed = {**self._aside, **error.files}, error
            names = ", ".join(sorted(error.files)[:_SHOWN])
            others = f" and {len(error.files) - _SHOWN} others" if len(error.files) > _SHOWN else ""
            _log.warning("%s; tried again with files that come later: %s%s", error, names, others)
            return None
        if entry is not None and self.failed is not None and entry.files.keys() >= self.failed.files.keys():
            self.failed = None
        return entry
