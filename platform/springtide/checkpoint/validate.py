"""Validate the names and numbers of a manifest and an index. Pure functions.

A checkpoint may come from an untrusted source. Its names become paths, and its numbers become offsets and sizes of reads. So
each name and number is checked when the checkpoint is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes per element, by the safetensors name of the type."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MANIFEST = re.compile(r"a\d{4,}-manifest\.json")
_OWN = re.compile(r"a\d{4,}-r\d{4,}\.(json|safetensors)")
_DATA = re.compile(r"step-\d{10}/a\d{4,}-r\d{4,}\.safetensors")
_LIMIT = 2**63


def check_manifest_name(name: Any) -> None:
    """Raise ValueError unless ``name`` is a file name of a manifest, without a path to another folder."""
    _require(_MANIFEST, name)


def check_files(files: Mapping[str, Mapping[str, Any]], refers: tuple[str, ...]) -> None:
    """Raise ValueError if the file names in a manifest are not valid. ``files``: names in the checkpoint's own folder, each
    with a size and a digest. ``refers``: paths of data files in folders of checkpoints."""
    for name, facts in files.items():
        _require(_OWN, name)
        _require(_DIGEST, facts.get("digest"))
        _require_counts(name, facts.get("size_bytes"))
    for name in refers:
        _require(_DATA, name)


def check_facts(index: Mapping[str, Any]) -> None:
    """Raise ValueError unless an index states valid sizes of its data file and header, and a valid digest of the header."""
    _require_counts("size_bytes", index.get("size_bytes"))
    if index["size_bytes"]:
        _require_counts("header_bytes", index.get("header_bytes"))
        _require(_DIGEST, index.get("header_digest"))


def check_piece(
    dtype: Any, shape: Any, offsets: Any, sizes: Any, file: Any, begin: Any, size_bytes: Any, digests: Any, block: int
) -> None:
    """Raise ValueError unless a piece is a box (rectangular part) of its tensor in a data file of a checkpoint, has the box's
    number of bytes, and has one digest per ``block`` bytes."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"not a type: {dtype!r}")
    _require(_DATA, file)
    _require_counts("a piece", *shape, *offsets, *sizes, begin, size_bytes)
    if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"not inside a tensor of shape {shape}: sizes {sizes} at offsets {offsets}")
    if size_bytes != math.prod(sizes) * ITEM_BYTES[dtype]:
        raise ValueError(f"not the size of a tensor part of shape {sizes} and type {dtype}: {size_bytes} bytes")
    if len(digests) != max(1, -(-size_bytes // block)):
        raise ValueError(f"wrong number of digests for {size_bytes} bytes: {len(digests)}")
    for one in digests:
        _require(_DIGEST, one)


def _require(pattern: re.Pattern[str], text: Any) -> None:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"not a valid name or digest: {text!r}")


def _require_counts(what: str, *values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < _LIMIT:
            raise ValueError(f"{what}: not a number of elements or bytes: {value!r}")
