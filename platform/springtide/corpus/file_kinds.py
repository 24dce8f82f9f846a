"""What a file holds by its name, and which files of a folder of data are no data."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from springtide.corpus.token_files import is_tokens

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_KINDS = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
_NO_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors)([._-].*)?"
    r"|_success|_started_.*|_committed_.*|_(common_)?metadata"  # of Spark, Databricks and Parquet
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json"  # of the datasets library
    r"|.*\.(md|lock|crc|md5|sha256)",
    re.IGNORECASE,
)


def kind_of(name: str) -> str:
    """Return what a file holds: ``lines`` (of JSON), ``parquet``, or ``text``, which is the rest."""
    plain = posixpath.splitext(name)[0] if compression_of(name) else name
    return _KINDS.get(_suffix(plain), "text")


def compression_of(name: str) -> str:
    """Return the compression of a file, empty if it has none."""
    return _COMPRESSIONS.get(_suffix(name), "")


def split_off(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of a source that are read, and those that are no data: in a folder of records or token ids, its
    documentation, licences and marks of other programs. A folder of text alone is read whole."""
    if all(kind_of(name) == "text" and not is_tokens(name) for name in names):
        return tuple(names), ()
    left_out = {name for name in names if kind_of(name) == "text" and _NO_DATA.fullmatch(posixpath.basename(name))}
    return tuple(name for name in names if name not in left_out), tuple(name for name in names if name in left_out)


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].lower()
