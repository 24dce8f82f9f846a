"""Room on a local disk: asked for before anything is written, and named when it has run out."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence

from springtide.corpus import CorpusReader
from springtide.errors import CorpusError, explain
from springtide.storage import Folder

_TIMES = 2.8
"""What parts, segments and shards take together, in sizes of the text: all three are there until the manifest is written."""


def check_room(sources: Sequence[CorpusReader], dataset: Folder) -> None:
    """Raise CorpusError if a local disk is too small for the dataset. What a killed prepare has written counts as room."""
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
                f"has {free / 2**30:.1f} GiB free, preparing {size / 2**30:.1f} GiB of text takes about three times that",
                "free some, or choose another folder",
            )
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it passes when somebody frees some


@contextlib.contextmanager
def explain_full(dataset: Folder) -> Iterator[None]:
    """Raise CorpusError for an error in the block that says that the disk is full."""
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
