"""``springtide data prepare --follow``: one sealed dataset after another, as text arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from springtide.app.prepare import write_card
from springtide.config import Config
from springtide.dataset import Progress, check_followed, complete, in_process, new_files, seal, silent
from springtide.shards import IndexEntry, read_index
from springtide.store import Folder


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

    Raises:
        ConfigError: a setting cannot work.
        CorpusError: the source cannot be reached, a file is damaged, or a batch has too little text for one row.
    """
    check_followed(config.corpus)
    root, done = Folder(config.shards.root), progress or silent
    last: dict[str, str] = {}
    looks = 0
    while True:
        entry = seal(config.corpus, config.shards, {}, done, in_process, listen)  # what a killed call has left
        now = new_files(config.corpus, read_index(root))
        files, last, looks = complete(last, now), now, looks + 1
        if entry is None and files and sum(int(look.partition(" ")[0]) for look in files.values()) >= at_least_bytes:
            entry = seal(config.corpus, config.shards, files, done, in_process, listen)
        if entry is not None:
            write_card(f"{root.url}/{entry.dataset}")
            yield entry
        if once and looks > 1:
            return
        wait(every_s)
