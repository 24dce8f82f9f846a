"""Say which disk is full, how much is missing, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil


def is_full(error: BaseException | None) -> bool:
    """Return whether a write failed because the disk is full or a quota is reached.

    >>> is_full(OSError(errno.ENOSPC, "No space left on device")), is_full(OSError("503 Slow Down"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def explain_full_disk(error: OSError, path: str, wanted_bytes: int) -> OSError:
    """Return the error of a write of ``wanted_bytes`` to ``path``, with the disk, its free bytes and the remedy."""
    disk = os.path.abspath(path)
    while not os.path.ismount(disk):
        disk = os.path.dirname(disk)
    room = f"the disk at {disk}"
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(disk)
        room += f" has {usage.free:,} of {usage.total:,} bytes free"
    what = f"{os.strerror(error.errno or 0)}: {path} needs {wanted_bytes:,} bytes"
    return OSError(error.errno, f"{what}, {room}; remove other files there, or enlarge it")
