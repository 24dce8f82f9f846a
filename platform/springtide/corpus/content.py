"""What the first bytes of a file say: a name may say that a file is text, and its content decides."""

from __future__ import annotations

import codecs
import re

SAMPLE_BYTES = 4096
"""Bytes of a file that are looked at."""
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
"""(beginning, problem, remedy, suffix that such a file should have)."""
_ANY_FORMAT = re.compile(b"|".join([rb"version https://git-lfs", *(pattern for pattern, *_ in _FORMATS)]))


def not_text(beginning: bytes, name: str) -> tuple[str, str] | None:
    """Return why a file is no text, and the remedy; None if it is text. A few bytes that are not UTF-8 are text.

    Args:
        beginning: the first ``SAMPLE_BYTES`` bytes of the file, or all of a shorter one.
        name: of the file, for the remedy.
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
    """Return what is wrong with a file that is a Git LFS pointer, and the remedy; None if it is none."""
    is_pointer = beginning.startswith(b"version https://git-lfs.github.com/spec/")
    return ("is a Git LFS pointer, not the file itself", "run: git lfs pull") if is_pointer else None


def other_format(beginning: bytes, name: str) -> tuple[str, str] | None:
    """Return which known format a file has that its name does not say, and the remedy; None if it has none."""
    if not _ANY_FORMAT.match(beginning):
        return None
    base = name.rpartition("/")[2]
    for pattern, problem, remedy, suffix in _FORMATS:
        if re.match(pattern, beginning) and not (suffix and base.lower().endswith(suffix)):
            return problem, remedy.format(name=base, stem=base.rpartition(".")[0] or base)
    return lfs_pointer(beginning)
