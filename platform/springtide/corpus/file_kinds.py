"""Recognise the format of a file by its name and first bytes, skip files that are not data, and decompress ``xz``."""

from __future__ import annotations

import codecs
import io
import lzma
import posixpath
import re
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from springtide.corpus.token_files import is_tokens

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
_MAYBE_TEXT = ("json", "csv")
"""Kinds of files that are read as plain text if most other files of the source are text, such as source code."""
NEW_KINDS = ("json", "csv", "arrow", "tar")
"""Kinds of files that earlier versions of springtide read as plain text."""
_NO_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors)([._-].*)?"
    r"|_success|_started_.*|_committed_.*|_(common_)?metadata"  # marker and metadata files of Spark, Databricks and Parquet
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json"  # metadata of the datasets library
    r"|.*\.(lock|crc|md5|sha256)",
    re.IGNORECASE,
)


class Sorted(NamedTuple):
    """The files of a source, sorted into those to read (``data``) and those to skip (``no_data``)."""

    data: tuple[str, ...]
    no_data: tuple[str, ...]
    is_text: bool
    """Whether .json, .csv and .tsv files are read as plain text, not as records."""


def kind_of(name: str) -> str:
    """Return the kind of a file by its suffix: ``lines`` (JSON lines), ``json``, ``csv``, ``parquet``, ``arrow`` or ``tar``.
    Any other suffix is ``text``."""
    plain = posixpath.splitext(name)[0] if compression_of(name) else name
    return _KINDS.get(_suffix(plain), "text")


def compression_of(name: str) -> str:
    """Return the compression of a file by its suffix, such as ``gzip``. Return "" if it has none."""
    return _COMPRESSIONS.get(_suffix(name), "")


def delimiter_of(name: str) -> str:
    """Return the delimiter between two cells of a CSV or TSV file."""
    return "\t" if ".tsv" in name[-8:].lower() else ","


def sort_out(names: Sequence[str]) -> Sorted:
    """Sort the files of a source into files to read and files to skip.

    A source is read as records if it has a file that can only hold records or token ids, such as Parquet, or if it has at least
    as many .json, .csv and .tsv files as text files. In such a source, documentation, licences and marker files of other
    programs are skipped. In any other source, such as a folder of source code, all files are read as plain text.
    """
    kinds = {name: "tokens" if is_tokens(name) else kind_of(name) for name in names}
    unnamed = [name for name, kind in kinds.items() if not _is_no_data(name, kind)]
    maybe, text = (sum(kinds[name] in some for name in unnamed) for some in (_MAYBE_TEXT, ("text",)))
    if len(unnamed) == maybe + text and (maybe < text or not maybe):
        return Sorted(tuple(names), (), is_text=True)
    no_data = {
        name for name, kind in kinds.items() if _is_no_data(name, kind) or (kind == "text" and _suffix(name) == ".md")
    }
    data = tuple(name for name in names if name not in no_data)
    return Sorted(data, tuple(name for name in names if name in no_data), is_text=False)


def _is_no_data(name: str, kind: str) -> bool:
    return kind in ("text", "json") and _NO_DATA.fullmatch(posixpath.basename(name)) is not None


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


# Decompress an ``xz`` file as a stream, in bounded memory.

_READ_BYTES = 2**16
_DECODER_BYTES = 128 * 2**20
"""Memory limit of a decompressor [bytes]. A file made by ``xz -9`` needs 65 MiB; a hostile header may request 4 GiB."""


class XzFile(io.RawIOBase):
    """The decompressed content of an ``.xz`` file, which may hold several streams with zeros between them.

    Reads raise a plain OSError if the file is damaged or cut, as pyarrow's decompressors do.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = _decoder()
        self._has_begun = False
        """Whether the current decoder has received a part of its stream. If True at the end of the file, the file is cut."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes read, 0 at the end of the file."""
        most = len(buffer)
        while most:
            if self._decoder.eof:
                rest = self._decoder.unused_data
                self._decoder, self._has_begun = _decoder(), False
            else:
                rest = self._file.read(_READ_BYTES) if self._decoder.needs_input else b""
                if not rest and self._decoder.needs_input:
                    if self._has_begun:
                        raise OSError("the xz file is cut, or is not in the xz format")
                    return 0
            if not self._has_begun:
                rest = rest.lstrip(b"\0")  # zeros between streams are padding
                self._has_begun = bool(rest)
            try:
                data = self._decoder.decompress(rest, most)
            except lzma.LZMAError as error:
                raise OSError(f"xz: {error}") from None
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        """Close this file and the compressed file."""
        self._file.close()
        super().close()


def _decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DECODER_BYTES)


# Check the first bytes of a file, because its name may wrongly say that it is text.

SAMPLE_BYTES = 4096
"""Number of bytes at the beginning of a file that are checked."""
_ALWAYS_ALLOWED = 16
_CONTROL = bytes({*range(32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})
_UTF_16 = "iconv -f UTF-16 -t UTF-8 < {name}"
_FORMATS = (
    (rb"\x1f\x8b", "begins as a gzip file", "name it {name}.gz", ".gz"),
    (rb"\xfd7zXZ\0", "begins as an xz file", "name it {name}.xz", ".xz"),
    (rb"\x28\xb5\x2f\xfd", "begins as a Zstandard file", "name it {name}.zst", ".zst"),
    (rb"BZh[1-9]1AY&SY", "begins as a bzip2 file", "name it {name}.bz2", ".bz2"),
    (rb"PK\x03\x04", "is a zip archive", "unpack it", ".zip"),
    (rb"PAR1[^\t\n\r -\x7e]", "is Parquet", "name it {stem}.parquet", ".parquet"),
    (rb"ARROW1\0\0|\xff\xff\xff\xff", "is Arrow", "name it {stem}.arrow", ".arrow"),
    (rb"[\0-\xff]{257}ustar", "is a tar archive", "name it {stem}.tar", ".tar"),
    (rb"%PDF-", "is a PDF", "extract its text", ""),
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "is UTF-32, not UTF-8", _UTF_16.replace("16", "32", 1), ""),
    (rb"\xff\xfe|\xfe\xff", "is UTF-16, not UTF-8", _UTF_16, ""),
)
"""Formats that are not text: (pattern of the first bytes, problem, remedy, suffix). A file whose name has the suffix is
not reported."""
_ANY_FORMAT = re.compile(b"|".join([rb"version https://git-lfs", *(pattern for pattern, *_ in _FORMATS)]))


def not_text(beginning: bytes, name: str) -> tuple[str, str] | None:
    """Return why a file is not text, and the remedy; None if it is text. Up to 10% of its bytes may be invalid.

    Args:
        beginning: the first ``SAMPLE_BYTES`` bytes of the file, or the whole file if it is shorter.
        name: name of the file, for the remedy.
    """
    if found := other_format(beginning, name):
        return found
    sample = beginning[:SAMPLE_BYTES]
    bad = len(sample) - len(sample.translate(None, _CONTROL))
    if not sample.isascii():
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(sample)
        bad += text.count("\ufffd") - sample.count(b"\xef\xbf\xbd")
    if bad <= max(_ALWAYS_ALLOWED, len(sample) // 10):
        return None
    problem = f"is not text in UTF-8: {bad:,} of its first {len(sample):,} bytes are not"
    return problem, "convert it (iconv -f ENCODING -t UTF-8), or leave it out with a glob such as '**/*.txt'"


def lfs_pointer(beginning: bytes) -> tuple[str, str] | None:
    """Return the problem and the remedy if a file is a Git LFS pointer, else None."""
    is_pointer = beginning.startswith(b"version https://git-lfs.github.com/spec/")
    return ("is a Git LFS pointer, not the file itself", "run: git lfs pull") if is_pointer else None


def other_format(beginning: bytes, name: str) -> tuple[str, str] | None:
    """Return a problem and a remedy if a file begins like a known format but its name lacks the suffix; otherwise None.
    Example: a gzip file without ``.gz``."""
    if not _ANY_FORMAT.match(beginning):
        return None
    base = name.rpartition("/")[2]
    for pattern, problem, remedy, suffix in _FORMATS:
        if re.match(pattern, beginning) and not (suffix and base.lower().endswith(suffix)):
            return problem, remedy.format(name=base, stem=base.rpartition(".")[0] or base)
    return lfs_pointer(beginning)
