"""Read the samples of a WebDataset tar. A sample is consecutive members (files of the tar) whose names are equal up to the
first dot after the folder, such as ``a/1.txt`` and ``a/1.json``.

The tar is read from its beginning, and no file is written to disk, so a hostile name is harmless. Links, devices and folders
are skipped. Headers are parsed here, because Python's ``tarfile`` keeps all headers in memory, and reads a header of any size
whole.
"""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

_BLOCK = 512
_READ_BYTES = 2**20
_MOST_NAME_BYTES = 2**16
"""Maximum size of an extra header that holds a long name [bytes]."""
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_SPARSE = re.compile(rb"GNU\.sparse")
_PAX = re.compile(rb"(\d{1,9}) ([^=\n]+)=")


class Sample(NamedTuple):
    """The one member (file in the tar) of a WebDataset sample that is read: it holds the text."""

    place: int
    """Position in the tar at which the member's header begins [bytes]."""
    name: str
    suffix: str
    """Part of the member's name after the first dot, in lower case; empty if no member of the sample holds text."""
    data: bytes
    """Content of the member, cut after ``most_bytes`` + 1 bytes."""


def read_samples(file: IO[bytes], suffixes: tuple[str, ...], most_bytes: int) -> Iterator[Sample]:
    """Yield one member (file in the tar) per sample. If members of a sample have a suffix in ``suffixes``, yield the member
    whose suffix comes first there. Otherwise yield the sample's first member, with empty data.

    Raises:
        OSError: the tar is damaged or cut, or has a sparse file.
    """
    key, best, rank = "", None, 0
    for place, name, size in _members(file):
        folder, base = posixpath.split(name)
        stem, _, suffix = base.partition(".")
        if (mine := f"{folder}/{stem}") != key and best:
            yield best
            best = None
        key, suffix = mine, suffix.lower()
        found = suffixes.index(suffix) if suffix in suffixes else len(suffixes)
        if best is None or found < rank:
            data = _read(file, min(size, most_bytes + 1)) if found < len(suffixes) else b""
            _skip(file, size - len(data))
            best, rank = Sample(place, name, suffix if found < len(suffixes) else "", data), found
        else:
            _skip(file, size)
        _skip(file, -size % _BLOCK)
    if best:
        yield best


def _members(file: IO[bytes]) -> Iterator[tuple[int, str, int]]:
    """Yield (position of its header in the tar, name, size) of each regular file in a tar [bytes]. Before taking the next file,
    the caller must read the data of this file, and the padding up to a multiple of 512 bytes."""
    place = 0
    name, size = "", -1
    while any(block := file.read(_BLOCK)):
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise OSError(f"byte {place:,} does not begin a tar header: {error}") from None
        length = header.size if size < 0 or header.type not in _FILES else size
        if length < 0:
            raise OSError(f"the member at byte {place:,} has a negative size, {length} bytes")
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
            if length > _MOST_NAME_BYTES:
                raise OSError(f"the header at byte {place:,} has {length:,} bytes, more than {_MOST_NAME_BYTES:,}")
            data = _read(file, length)
            _skip(file, -length % _BLOCK)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                found = _pax(data, place)
                name, size = found.get("path", name), int(found.get("size", size))
        else:
            if header.type in _FILES and not (name or header.name).endswith("/"):
                yield place, name or header.name, length
            else:
                if header.type == tarfile.GNUTYPE_SPARSE:
                    raise OSError(f"the member at byte {place:,} is sparse")
                is_empty = header.type in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
                length = 0 if is_empty or header.type in (tarfile.CHRTYPE, tarfile.BLKTYPE) else length
                _skip(file, length + -length % _BLOCK)
            if header.type != tarfile.XGLTYPE:
                name, size = "", -1
        place += _BLOCK + length + -length % _BLOCK


def _pax(data: bytes, place: int) -> dict[str, str]:
    """Return the fields ``path`` and ``size`` of an extended (pax) header. A field that the header lacks is missing in the
    result."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) and (field := _PAX.match(data, at)):
        end = at + int(field[1])
        value = data[field.end() : end - 1]
        if (
            _SPARSE.match(field[2])
            or (field[2] == b"size" and not value.isdigit())
            or end <= field.end()
            or len(value) > 2**12
        ):
            break
        if field[2] in (b"path", b"size"):
            found[field[2].decode()] = value.decode("utf-8", "surrogateescape")
        at = end
    else:
        if at >= len(data):
            return found
    raise OSError(f"the extended header at byte {place:,} is damaged, or of a sparse file")


def _read(file: IO[bytes], size: int) -> bytes:
    """Return the next ``size`` bytes of the tar. Raises OSError if the tar ends earlier."""
    parts = []
    while size > 0 and (part := file.read(min(size, _READ_BYTES))):
        parts.append(part)
        size -= len(part)
    if size > 0:
        raise OSError("the tar is cut")
    return b"".join(parts)


def _skip(file: IO[bytes], size: int) -> None:
    while size > 0:
        size -= len(_read(file, min(size, _READ_BYTES)))
