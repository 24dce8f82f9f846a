"""A folder in any file system that fsspec reaches: local disk, s3, gs, az, memory.

A write is atomic. On a local disk a temporary file next to the target is written, synced and renamed. In an object store a
put is atomic. Errors of a store's client are raised as OSErrors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
import fsspec.utils
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from pydantic import TypeAdapter, ValidationError

from springtide.errors import ConfigError, damaged, explain
from springtide.storage.errors import as_os_errors, explain_full_disk, is_full
from springtide.storage.local_files import check_confined, read_range, regular_file, remove_old, unlink
from springtide.storage.plain_json import most_values, to_json

_T = TypeVar("_T")
_TEMPORARY = ".tmp-"
_PROTOCOLS = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "memory")
_SOURCES = ("http", "https")
"""Further protocols from which a corpus (source text) may be read. All other protocols are refused, because some protocols of
fsspec can run commands or templates."""
_ONE_PUT_BYTES = 16 * 2**20
_STREAM_BYTES = 2**20
_WHOLE_BYTES = 256 * 2**20
"""Size limit of files that are read as a whole (manifest, index, journal, config). A hostile file may be larger than memory."""

_MOST_VALUES = 2**24
"""Largest number of values in a JSON file that is parsed. Parsed JSON takes more memory than its text: up to 26 times as much,
for ``{},``."""


class Folder:
    """A folder, given by its URL. The ``name`` arguments of its methods use ``/`` and are relative to the folder."""

    def __init__(
        self, url: str | os.PathLike[str], is_source: bool = False, is_confined: bool = False, **options: Any
    ) -> None:
        """Open ``url``; nothing is created before the first write. ``is_source``: the folder is a corpus (source text), which
        is only read, so http and https are allowed too. ``is_confined``: apply the checks of ``confined``. Raises ConfigError
        for an unsupported protocol or a chained URL."""
        self._options = {"is_source": is_source, "is_confined": is_confined, **options}
        self._is_confined = is_confined
        _check_protocol(os.fspath(url), _PROTOCOLS + _SOURCES if is_source else _PROTOCOLS)
        # no cache of listings: fsspec would keep it as long as this process lives, but other processes write here
        self.fs, path = fsspec.core.url_to_fs(os.fspath(url), use_listings_cache=False, **options)
        self.path = path.rstrip("/") or path
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._is_s3 = "s3" in self.fs.protocol

    @property
    def url(self) -> str:
        """The folder's URL; a plain path for a local folder."""
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> Folder:
        below = Folder(posixpath.join(self.url, name), **self._options)
        if self._is_confined and self.is_local:  # check now: if ``name`` is a link, later checks start at its target
            check_confined(below.path, self.path)
        return below

    def confined(self) -> Folder:
        """Return this folder with checks for untrusted contents.

        A read or write through a link out of the folder raises ConfigError. So does a read or write of a pipe or a device.
        Links from a snapshot in the cache of the Hugging Face Hub to the blobs of that cache are allowed.
        """
        return Folder(self.url, **{**self._options, "is_confined": True})

    def where(self, name: str) -> str:
        """Return the path of ``name`` in the fsspec file system."""
        return posixpath.join(self.path, name)

    def can_ask_for(self, name: str) -> bool:
        """Return True if the store's client can request ``name``. S3 allows keys that its client cannot request, such as
        ``a//b``."""
        if self._is_s3:
            from springtide.storage import s3

            return s3.can_ask_for(self.where(name))
        return True

    def read(self, name: str) -> bytes:
        """Return all bytes of ``name``, a small file: manifest, index, journal or config. Raises FileNotFoundError if there is
        no such file, DamagedFile if it is larger than ``_WHOLE_BYTES``."""
        data = self._read_whole(name)
        if data is None:
            limit = f"is larger than {_WHOLE_BYTES:,} bytes, the limit of files that are read whole"
            raise damaged(self.where(name), limit)
        return data

    def _read_whole(self, name: str) -> bytes | None:
        """Return all bytes of ``name``; None if there are more than ``_WHOLE_BYTES``."""
        if self._is_s3:
            from springtide.storage import s3

            return s3.read(self.fs, self.where(name), _WHOLE_BYTES)
        size = os.stat(self.local_file(name)).st_size if self.is_local else 0
        if size > _WHOLE_BYTES:
            return None
        with as_os_errors(self.where(name)), self.open(name) as file:
            data = bytes(file.read(size + 1 if self.is_local else _WHOLE_BYTES + 1))
        return None if len(data) > _WHOLE_BYTES else data

    def read_json(self, name: str) -> Any:
        """Return the JSON value in ``name``. Raises DamagedFile, a ValueError, if it is not JSON or has too many values, and
        the errors of ``read``."""
        data = self.read(name)
        if len(data) > _MOST_VALUES and (found := most_values(data)) > _MOST_VALUES:
            raise damaged(self.where(name), f"has {found:,} values of JSON, and {_MOST_VALUES:,} is the limit")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise damaged(self.where(name), f"is not JSON ({error})") from None

    def read_as(self, name: str, kind: TypeAdapter[_T]) -> _T:
        """Return the JSON value in ``name``, validated by pydantic as a ``kind``. Raises DamagedFile if it is not valid, and
        the errors of ``read_json``."""
        value = self.read_json(name)
        try:
            return kind.validate_python(value)
        except ValidationError as error:
            raise damaged(self.where(name), f"has other contents than expected ({first_problem(error)})") from None

    def open(self, name: str) -> IO[bytes]:
        """Open ``name`` for reading with seeks. Raises FileNotFoundError if it is not a regular file."""
        if self.is_local:
            return self.fs.open(self.local_file(name), "rb")
        if self._is_s3:
            from springtide.storage import s3

            return s3.open_file(self.fs, self.where(name))
        with as_os_errors(self.where(name)):
            return self.fs.open(self.where(name), "rb")

    def local_file(self, name: str) -> str:
        """Return the path of a local file. Raises FileNotFoundError if it does not exist or is not a regular file."""
        path = self.where(name)
        if self._is_confined:
            check_confined(path, self.path)
        return regular_file(path)

    def read_range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        """Return bytes [begin, end) of ``name``; fewer if the file is shorter. Thread-safe."""
        if self.is_local:
            with open(self.local_file(name), "rb", buffering=0) as file:
                # a hostile ``end`` could be huge, and read_range may allocate a buffer of the size of the range
                end = min(end, os.fstat(file.fileno()).st_size)
                return read_range(file.fileno(), begin, end) if begin < end else b""
        if self._is_s3:
            from springtide.storage import s3

            return s3.read_range(self.fs, self.where(name), begin, end)
        with as_os_errors(self.where(name)):
            return bytes(self.fs.cat_file(self.where(name), start=begin, end=end))

    def stream(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes [begin, end) of ``name`` in small parts, which are still in the CPU cache when the caller uses them."""
        if self.is_local:
            with open(self.local_file(name), "rb", buffering=0) as file:
                while part := os.pread(file.fileno(), min(end - begin, _STREAM_BYTES), begin):
                    yield memoryview(part)
                    begin += len(part)
        elif self._is_s3:
            from springtide.storage import s3

            yield from s3.stream(self.fs, self.where(name), begin, end)
        else:
            yield memoryview(self.read_range(name, begin, end))

    def write(self, name: str, data: bytes | str, private: bool = False) -> None:
        """Write ``data`` as the file ``name``, atomically. ``private``: on a local disk only the file's owner may read it."""
        data = data.encode() if isinstance(data, str) else data
        self.put(name, [memoryview(data)], private)

    def put(self, name: str, parts: Sequence[memoryview], private: bool = False) -> None:
        """Write the bytes of ``parts``, in order, as the file ``name``, atomically. Large data is not joined in memory."""
        self.put_stream(name, parts, sum(part.nbytes for part in parts), private)

    def put_stream(self, name: str, parts: Iterable[memoryview], size_bytes: int, private: bool = False) -> None:
        """Write ``parts``, ``size_bytes`` in total, as ``put`` does. Parts are consumed as they are written, so only a few are
        in memory."""
        target = self.where(name)
        if self.is_local:
            if self._is_confined:
                check_confined(target, self.path)
            with self._beside(target, parts, size_bytes, 0o600 if private else 0o666) as beside:
                os.replace(beside, target)
        elif self._is_s3:
            from springtide.storage import s3

            s3.put(self.fs, target, parts, size_bytes)
        elif size_bytes <= _ONE_PUT_BYTES:
            with as_os_errors(target):
                self.fs.pipe_file(target, b"".join(parts))  # one put: atomic in an object store
        else:
            with as_os_errors(target), _all_or_nothing(self.fs.open(target, "wb", block_size=_ONE_PUT_BYTES)) as file:
                for part in parts:
                    file.write(part)

    @property
    def has_atomic_create(self) -> bool:
        """True if ``create`` is certain to refuse an existing file. An object store may not support conditional puts."""
        return self.is_local or "memory" in self.fs.protocol

    def create(self, name: str, data: bytes, before_retry: Callable[[], None] = lambda: None) -> None:
        """Write ``data`` as the file ``name`` if it does not exist; otherwise raise FileExistsError and do not change it.

        Of several concurrent callers exactly one succeeds, if the store can ensure that (local disks, S3, gs, az).
        ``before_retry`` is called before each try after the first, and may raise to end the tries.
        """
        target = self.where(name)
        if self.is_local:
            with self._beside(target, [memoryview(data)], len(data)) as beside:
                os.link(beside, target)
        elif self._is_s3:
            from springtide.storage import s3

            s3.create(self.fs, target, data, before_retry)
        else:
            with as_os_errors(target):
                self.fs.pipe_file(target, data, mode="create")

    @contextlib.contextmanager
    def _beside(self, target: str, parts: Iterable[memoryview], size_bytes: int, mode: int = 0o666) -> Iterator[str]:
        """Write ``parts``, ``size_bytes`` in total, to a temporary file next to ``target``, sync it, and yield its path. The
        ``with`` block renames or links it to the target. ``mode``: file mode before the umask is applied."""
        folder = os.path.dirname(target)
        beside = os.path.join(folder, f"{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(beside, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags, mode)) as file:
                for part in parts:
                    while part.nbytes:  # one call of ``write`` writes at most 2 GiB
                        part = part[file.write(part) :]
                os.fsync(file.fileno())
            yield beside
            sync_directory(folder)
        except OSError as error:
            if not is_full(error):
                raise
            unlink(beside)  # remove the file first, because the message reports the free bytes
            raise explain_full_disk(error, target, size_bytes) from error
        finally:
            unlink(beside)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, to_json(value, indent=1, sort_keys=True))

    def exists(self, name: str = "") -> bool:
        path = self.where(name) if name else self.path
        with as_os_errors(path):
            return bool(self.fs.exists(path))

    def size(self, name: str) -> int:
        """Return the size of ``name`` in bytes."""
        if self.is_local:
            return os.stat(self.local_file(name)).st_size
        with as_os_errors(self.where(name)):
            return int(self.fs.size(self.where(name)))

    def written_s(self, name: str) -> float:
        """Return when ``name`` was written, by the store's clock, in seconds since 1970. Object stores return whole seconds.
        NaN if the store does not return a time."""
        try:
            with as_os_errors(self.where(name)):
                return float(self.fs.modified(self.where(name)).timestamp())
        except NotImplementedError:
            return math.nan

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries below this folder that match the fsspec glob ``pattern``: path -> fsspec's details of the entry.
        Pattern characters in the folder's own path are taken literally."""
        if not any(char in self.path for char in "*?["):
            return dict(self.fs.glob(posixpath.join(self.path, pattern), detail=True))
        matches, begin = re.compile(fsspec.utils.glob_translate(pattern)).match, len(self.path) + 1
        return {path: one for path, one in self.fs.find(self.path, detail=True).items() if matches(path[begin:])}

    def names(self) -> list[str]:
        """Return the names of files and folders directly in the folder, sorted; an empty list if the folder does not exist.
        Temporary files of unfinished writes are not listed."""
        try:
            with as_os_errors(self.path):
                paths = self.fs.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        found = (posixpath.basename(str(path).rstrip("/")) for path in paths)
        return sorted(name for name in found if name and not name.startswith(_TEMPORARY))

    def files(self) -> list[str]:
        """Return the names of all files in the folder and its subfolders, sorted, with one listing request if the store can do
        that. Temporary files of unfinished writes are not listed."""
        if self._is_s3:
            from springtide.storage import s3

            found = s3.files(self.fs, self.path)
        else:
            with as_os_errors(self.path):
                found = [posixpath.relpath(str(path), self.path) for path in self.fs.find(self.path)]
        return sorted(name for name in found if not posixpath.basename(name).startswith(_TEMPORARY))

    def remove(self, name: str = "") -> None:
        """Remove ``name`` and everything below it; without a name, the whole folder. Does nothing if it does not exist."""
        path = self.where(name) if name else self.path
        with contextlib.suppress(FileNotFoundError), as_os_errors(path):
            self.fs.rm(path, recursive=True)

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove the files ``names``, in as few requests as the store allows. Files that do not exist are ignored."""
        if self.is_local:
            for name in names:
                unlink(self.where(name))
        elif self._is_s3:
            from springtide.storage import s3

            s3.remove(self.fs, [self.where(name) for name in names])
        elif names:
            paths = [self.where(name) for name in names]
            try:
                with as_os_errors(self.path):
                    self.fs.rm(paths)
            except FileNotFoundError:  # a missing file ended the request, and others may be left: remove one by one
                for path in paths:
                    with contextlib.suppress(FileNotFoundError), as_os_errors(path):
                        self.fs.rm_file(path)

    def remove_if_empty(self) -> None:
        """Remove the folder if it is local and empty."""
        if self.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    def sweep(self, unchanged_s: float = 0.0) -> None:
        """Remove temporary files that killed writers left directly in the folder, if it is local. If another process may be
        writing to the folder, set ``unchanged_s``: files that were written to in the last ``unchanged_s`` seconds are kept."""
        if self.is_local:
            remove_old(self.path, _TEMPORARY, unchanged_s)

    def check_writable(self) -> None:
        """Raise OSError if the folder cannot be written, so that a run fails at its start and not an hour later. Removes its
        test file and the folders that it created."""
        name = f"{_TEMPORARY}{uuid.uuid4().hex[:12]}"
        made = [path for path in [Path(self.path), *Path(self.path).parents] if self.is_local and not path.exists()]
        self.write(name, b"")
        self.remove(name)
        with contextlib.suppress(OSError):  # not empty any more: another process uses the folder
            for path in made:
                path.rmdir()


def _check_protocol(url: str, known: Sequence[str]) -> None:
    protocol = fsspec.core.split_protocol(url)[0] or "file"  # also recognizes ``data:``, a protocol without slashes
    if "::" in url:
        raise ConfigError(explain("URL", url, "is a chain of URLs (::), which is not opened", "give one plain URL"))
    if protocol.lower() not in known:
        known_here = f"has a protocol that is not opened here: {protocol!r}"
        raise ConfigError(explain("URL", url, known_here, f"use one of {', '.join(known)}, or a path"))


@contextlib.contextmanager
def _all_or_nothing(file: Any) -> Iterator[Any]:
    """Close ``file`` of an object store after the ``with`` block. If the block raises, discard the upload instead: closing it
    would publish an incomplete file."""
    try:
        yield file
    except BaseException:
        if isinstance(file, AbstractBufferedFile):
            file.closed = True
            with contextlib.suppress(Exception):  # if the discard fails, readers still cannot see the unfinished upload
                file.discard()
        raise
    file.close()


def first_problem(error: ValidationError) -> str:
    """Return the first problem in a pydantic ``error`` as one line: the field and the message."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join(filter(None, (".".join(map(str, found["loc"]))[:100], found["msg"][:200])))


def sync_directory(path: str) -> None:
    """Sync the folder ``path`` to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
