"""Calls of the operating system on files of a local disk."""

from __future__ import annotations

import contextlib
import os
import time

_ONE_READ_BYTES = 2**30
"""Most bytes that one call surely reads: Linux ends a read at 2 GiB less a page."""


def read_range(file: int, begin: int, end: int) -> bytes | memoryview:
    """Return bytes [begin, end) of an open file; fewer if it has become shorter."""
    if end - begin <= _ONE_READ_BYTES and len(data := os.pread(file, end - begin, begin)) == end - begin:
        return data
    buffer = memoryview(bytearray(end - begin))
    done = 0
    while done < len(buffer) and (read := os.preadv(file, [buffer[done:]], begin + done)):
        done += read
    return buffer[:done].toreadonly()


def unlink(path: str) -> None:
    """Remove a file; not an error if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def remove_old(folder: str, prefix: str, unchanged_s: float) -> None:
    """Remove the files directly in ``folder`` whose names begin with ``prefix``, and to which nobody has written for
    ``unchanged_s`` seconds."""
    before_s = time.time() - unchanged_s
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # its writer has renamed it
                    if entry.stat(follow_symlinks=False).st_mtime <= before_s:
                        os.unlink(entry.path)
