"""Convert errors of object stores' client packages to OSErrors: code that retries after an OSError then covers all stores."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator

PACKAGES = frozenset(
    {
        *("aiobotocore", "botocore", "s3fs", "obstore", "gcsfs", "google", "adlfs", "azure", "aiohttp", "requests"),
        *("urllib3", "huggingface_hub", "httpx", "httpx2"),
    }
)
"""Client packages of object stores. Not all of their errors are OSErrors."""
_KINDS: tuple[tuple[type[OSError], tuple[str, ...], tuple[int, ...]], ...] = (
    (FileNotFoundError, ("NotFound",), (404,)),
    (FileExistsError, ("Exists", "Precondition", "ResourceModified"), (409, 412)),
    (PermissionError, ("Forbidden", "Unauthorized", "Authentication", "Credentials"), (401, 403)),
)
"""Errors that a retry cannot fix: (OSError class to raise, words in the names of the clients' error classes, HTTP codes)."""


FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""OSErrors that a retry cannot fix."""


def may_pass(error: BaseException) -> bool:
    """Return True if a retry may help after an operation of a store failed with ``error``.

    >>> may_pass(OSError("503 Slow Down")), may_pass(PermissionError("403 Forbidden"))
    (True, False)
    """
    return isinstance(error, OSError) and not isinstance(error, FINAL)


def of_store(error: BaseException) -> bool:
    """Return True if the class of an error, or a base class, is from a client package of an object store (``PACKAGES``)."""
    return bool({kind.__module__.split(".")[0] for kind in type(error).__mro__} & PACKAGES)


@contextlib.contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """If the ``with`` block raises an error of a store's client, convert the error to an OSError that names ``path``.

    If the client's error means that a file is missing, a file exists or access is denied, the OSError is a FileNotFoundError,
    FileExistsError or PermissionError. Errors that are not from a store's client pass unchanged.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if not of_store(error):
            raise
        text = f"{path}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}"
        raise _kind(error)(text) from error


def _kind(error: Exception) -> type[OSError]:
    code = getattr(error, "code", getattr(error, "status_code", getattr(error, "status", None)))
    for kind, words, codes in _KINDS:
        if code in codes or (not isinstance(code, int) and any(word in type(error).__name__ for word in words)):
            return kind
    return OSError


# Error messages for a full disk.


def is_full(error: BaseException | None) -> bool:
    """Return True if a write failed because the disk is full or a quota is reached.

    >>> is_full(OSError(errno.ENOSPC, "No space left on device")), is_full(OSError("503 Slow Down"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def explain_full_disk(error: OSError, path: str, wanted_bytes: int) -> OSError:
    """Return an OSError that explains ``error``: a write of ``wanted_bytes`` to ``path`` failed because the disk is full. The
    message has the disk, its free bytes and a remedy."""
    disk = os.path.abspath(path)
    while not os.path.ismount(disk):
        disk = os.path.dirname(disk)
    room = f"the disk at {disk}"
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(disk)
        room += f" has {usage.free:,} of {usage.total:,} bytes free"
    what = f"{os.strerror(error.errno or 0)}: {path} needs {wanted_bytes:,} bytes"
    return OSError(error.errno, f"{what}, {room}; remove other files there, or enlarge it")
