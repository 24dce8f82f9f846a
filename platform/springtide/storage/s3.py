"""Read and write S3 through obstore, with the endpoint and credentials of s3fs.

obstore is used in addition to s3fs because a save is 1.2 times as fast with it on two cores: 98 to 106 MiB/s against 82
(docs/explanation/measured.md, checkpoint). Loads and streams are equally fast. obstore's requests, retries and parts in flight
run in its own threads, without the GIL. It retries after throttling (503 SlowDown), a 5xx or a dropped connection, with
exponential backoff and jitter. S3 limits writes per prefix to 3,500/s; with parts of 8 MiB a save stays far below that.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import obstore
from fsspec.asyn import sync
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

_CREDENTIALS_LAST = datetime.timedelta(minutes=5)
"""obstore requests credentials from the s3fs session again after this time. The session renews them."""
_STREAM_BYTES = 256 * 2**10
_READ_BYTES = 2**20
_PART_BYTES = 8 * 2**20
_PARTS_IN_FLIGHT = 4
_RETRIES = 12
_CREATE_TRIES = 8
_RETRY_FOR = datetime.timedelta(minutes=2)
_REQUEST_TIMEOUT = datetime.timedelta(minutes=2)
"""Longest time of one request, such as a part of 8 MiB: enough for a slow store, but a dead connection does not block
forever."""
_MOST_PARTS = 10_000
"""S3's limit of parts per object."""

_UNASKED = re.compile(r"(^|/)\.{0,2}(/|$)|[\0-\x1f\x7f]")
"""Matches paths that obstore does not accept although S3 allows such keys: empty parts, ``.``, ``..``, control characters."""


def can_ask_for(path: str) -> bool:
    """Return True if obstore can request ``bucket/key``.

    Examples:
        >>> can_ask_for("bucket/texts/a.txt"), can_ask_for("bucket/texts//a.txt")
        (True, False)
    """
    return not _UNASKED.search(path.partition("/")[2])


def read(fs: Any, path: str, most_bytes: int) -> bytes | None:
    """Return all bytes of ``bucket/key``; None if there are more than ``most_bytes``. Raises FileNotFoundError if the object
    does not exist, OSError if all retries fail."""
    bucket, key = path.split("/", 1)
    with _as_os_errors(path):
        found = obstore.get(_bucket(fs, bucket), key)
        return None if found.meta["size"] > most_bytes else bytes(found.bytes())


def read_range(fs: Any, path: str, begin: int, end: int) -> memoryview:
    """Return bytes [begin, end) of ``bucket/key``. Raises the errors of ``read``."""
    if begin >= end:
        return memoryview(b"")  # obstore refuses an empty range
    bucket, key = path.split("/", 1)
    with _as_os_errors(path):
        return memoryview(obstore.get_range(_bucket(fs, bucket), key, start=begin, end=end))


def stream(fs: Any, path: str, begin: int, end: int) -> Iterator[memoryview]:
    """Yield bytes [begin, end) of ``bucket/key`` as they arrive, about 256 KiB at a time. After a dropped connection the stream
    resumes at the first missing byte. Raises the errors of ``read``."""
    bucket, key = path.split("/", 1)
    with _as_os_errors(path):
        found = obstore.get(_bucket(fs, bucket), key, options={"range": (begin, end)})
        yield from (memoryview(part) for part in found.stream(min_chunk_size=_STREAM_BYTES))


def open_file(fs: Any, path: str) -> IO[bytes]:
    """Open ``bucket/key`` for reading with seeks. Smaller reads are served from a buffer of 1 MiB. Raises the errors of
    ``read``."""
    return io.BufferedReader(_File(fs, path), _READ_BYTES)


class _File(io.RawIOBase):
    """An S3 object as a raw file: each read is one ranged request. fsspec's file would read 50 MiB ahead, far more than one
    read of a corpus needs."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path, self._place = fs, path, 0
        bucket, key = path.split("/", 1)
        with _as_os_errors(path):
            self._size = int(obstore.head(_bucket(fs, bucket), key)["size"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes read, 0 at the end of the object."""
        end = min(self._place + len(buffer), self._size)
        if self._place >= end:
            return 0
        data = read_range(self._fs, self._path, self._place, end)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def files(fs: Any, path: str) -> list[str]:
    """Return the names of all objects below ``bucket/prefix/``, relative to that prefix, unsorted."""
    bucket, _, prefix = path.partition("/")
    prefix += "/" if prefix else ""
    with _as_os_errors(path):
        found = obstore.list(_bucket(fs, bucket), prefix).collect()
    return [one["path"].removeprefix(prefix) for one in found]


def remove(fs: Any, paths: Sequence[str]) -> None:
    """Remove the objects ``paths`` (``bucket/key``), a thousand per request if the store supports that (DeleteObjects). Objects
    that do not exist are ignored. Raises OSError if all retries fail."""
    by_bucket: dict[str, list[str]] = {}
    for path in paths:
        bucket, key = path.split("/", 1)
        by_bucket.setdefault(bucket, []).append(key)
    for bucket, keys in by_bucket.items():
        store = _bucket(fs, bucket)
        with _as_os_errors(f"{bucket}/{keys[0]}"):
            try:
                obstore.delete(store, keys)
            except (NotSupportedError, GenericError):  # not every S3-compatible store supports DeleteObjects
                for key in keys:
                    with contextlib.suppress(NotFoundError):
                        obstore.delete(store, key)


def put(fs: Any, path: str, parts: Iterable[memoryview], size: int) -> None:
    """Write ``parts``, ``size`` bytes in total, as ``bucket/key``, atomically. Uses several parallel requests if ``size``
    is large. Raises OSError if all retries fail."""
    bucket, key = path.split("/", 1)
    part = max(_PART_BYTES, -(-size // _MOST_PARTS))
    with _as_os_errors(path):
        if size <= part:
            obstore.put(_bucket(fs, bucket), key, b"".join(parts), use_multipart=False)
        else:
            obstore.put(_bucket(fs, bucket), key, iter(parts), chunk_size=part, max_concurrency=_PARTS_IN_FLIGHT)


def create(fs: Any, path: str, data: bytes, before_retry: Callable[[], None] = lambda: None) -> None:
    """Write ``bucket/key`` if it does not exist (If-None-Match); else raise FileExistsError. OSError if all retries fail.

    If the response to a put was lost, a retry finds the object that the first try wrote and raises FileExistsError. So the
    caller must compare the object's bytes with ``data``. ``before_retry``: as in ``Folder.create``.
    """
    bucket, key = path.split("/", 1)
    for left in reversed(range(_CREATE_TRIES)):
        try:
            with _as_os_errors(path):
                obstore.put(_bucket(fs, bucket), key, data, mode="create", use_multipart=False)
            return
        except (FileExistsError, PermissionError):
            raise
        except OSError:  # obstore does not retry a conditional put when the connection drops
            if not left:
                raise
            time.sleep(random.uniform(0.5, 1.0) * min(5.0, 0.1 * 2.0 ** (_CREATE_TRIES - left)))
            before_retry()


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(f"{path}: {_short(error)}") from None
    except (AlreadyExistsError, PreconditionError) as error:
        raise FileExistsError(f"{path}: {_short(error)}") from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(f"{path}: {_short(error)}") from None
    except BaseError as error:
        raise OSError(f"{path}: {_short(error)}") from None


def _short(error: BaseError) -> str:
    """Return the first line of the error. The later lines are obstore's debug output."""
    return str(error).strip().split("\n", 1)[0][:500]


@functools.lru_cache(maxsize=8)
def _bucket(fs: Any, name: str) -> S3Store:
    fs.connect()

    def credentials() -> Any:
        keys = fs.key, fs.secret, fs.token
        if fs.key is None:
            found = sync(fs.loop, fs.session.get_credentials)
            keys = tuple(sync(fs.loop, found.get_frozen_credentials))
        names = ("access_key_id", "secret_access_key", "token")
        return {
            **dict(zip(names, keys, strict=False)),
            "expires_at": datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LAST,
        }

    return S3Store(
        name,
        endpoint=fs.s3.meta.endpoint_url,
        region=fs.s3.meta.region_name,
        client_options={"allow_http": True, "timeout": _REQUEST_TIMEOUT},
        retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_FOR},
        **({"skip_signature": True} if fs.anon else {"credential_provider": credentials}),
    )
