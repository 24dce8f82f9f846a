"""Calls of the operating system on files of a local disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

from springtide.errors import ConfigError, explain

_ONE_READ_BYTES = 2**30
"""Most bytes that one call surely reads: Linux ends a read at 2 GiB less a page."""


_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders of a repository in the hub's cache: ``snapshots/REVISION/NAME`` is a link to ``blobs/DIGEST``."""


def regular_file(path: str) -> str:
    """Return ``path``. FileNotFoundError if there is no file, or something else than a regular file: a pipe would wait for its
    writer, and a device, or a link to one, never ends."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        # a link to itself is not a file; a folder above it that cannot be reached says nothing about the file
        if error.errno != errno.ENOTDIR and not (error.errno == errno.ELOOP and os.path.islink(path)):
            raise
        raise FileNotFoundError(errno.ENOENT, error.strerror, path) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise FileNotFoundError(errno.ENOENT, "is not a regular file", path)
    return path


def stays_inside(path: str, folder: str) -> bool:
    """Return whether ``path`` lies in ``folder`` when all links are followed, or in the blobs beside it if ``folder`` is a
    snapshot in the cache of the Hugging Face Hub."""
    root, real = os.path.realpath(folder), os.path.realpath(path)
    roots, above = [root], os.path.dirname(root)
    if os.path.basename(above) == _SNAPSHOTS:  # not resolved: blobs that are a link themselves may lead anywhere
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
