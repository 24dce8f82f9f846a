"""Operations on files of a local disk, with checks of links, pipes and devices."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

from springtide.errors import ConfigError, explain

_ONE_READ_BYTES = 2**30
"""Bytes that a single ``pread`` call surely reads: Linux limits a call to 2 GiB minus a page."""


_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders of a repository in the cache of the Hugging Face Hub: ``snapshots/REVISION/NAME`` is a link to ``blobs/DIGEST``."""


def regular_file(path: str) -> str:
    """Return ``path`` if it is a regular file. Otherwise raises FileNotFoundError, or IsADirectoryError for a folder.

    Pipes and devices are refused, because a read of a pipe waits for its writer, and a read of a device may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        # a link to itself counts as missing; after other errors, such as an unreadable parent folder, the file may exist
        if error.errno != errno.ENOTDIR and not (error.errno == errno.ELOOP and os.path.islink(path)):
            raise
        raise FileNotFoundError(errno.ENOENT, error.strerror, path) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise FileNotFoundError(errno.ENOENT, "is not a regular file", path)
    return path


def stays_inside(path: str, folder: str) -> bool:
    """Return True if ``path``, with all links followed, lies in ``folder``.

    If ``folder`` is a snapshot in the cache of the Hugging Face Hub, ``path`` may also lie in that repository's ``blobs``.
    """
    root, real = os.path.realpath(folder), os.path.realpath(path)
    roots, above = [root], os.path.dirname(root)
    if os.path.basename(above) == _SNAPSHOTS:  # do not resolve ``blobs``: a link there could lead anywhere
        roots.append(os.path.join(os.path.dirname(above), _BLOBS))
    return any(os.path.commonpath([one, real]) == one for one in roots)


def check_confined(path: str, folder: str) -> None:
    """Raise ConfigError if ``path`` leads out of ``folder``, or is a pipe or a device."""
    if not stays_inside(path, folder):
        problem = "is a link to a file outside of its folder, which is not followed"
        raise ConfigError(explain(path, os.path.realpath(path), problem, "put a copy of the file in its place"))
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            problem, remedy = "is not a regular file", "put a regular file in its place"
            raise ConfigError(explain(path, stat.filemode(mode), problem, remedy))


def read_range(file: int, begin: int, end: int) -> bytes | memoryview:
    """Return bytes [begin, end) of the open file with descriptor ``file``; fewer if the file is shorter."""
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
    """Remove the files directly in ``folder`` whose names begin with ``prefix``, if they have not been written to for
    ``unchanged_s`` seconds."""
    before_s = time.time() - unchanged_s
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # the file's writer has just renamed it
                    if entry.stat(follow_symlinks=False).st_mtime <= before_s:
                        os.unlink(entry.path)
