"""JSON that every reader takes: RFC 8259 has no NaN and no infinity, and browsers, jq and databases refuse them. And the
number of values in JSON text that nobody has checked, before it is parsed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_PART_BYTES = 2**16


def to_json(value: Any, **options: Any) -> str:
    """Return ``value`` as JSON, with null for numbers that are not finite. ``options`` as for ``json.dumps``.

    >>> to_json({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare: most values are finite
        return json.dumps(_finite(value), allow_nan=False, **options)


def most_values(text: bytes) -> int:
    """Return the number of values in JSON text, or a few more: opening brackets and commas outside of strings, and one.

    Three bytes of ``{},`` become 70 bytes of memory, so a hostile file of a moderate size may not fit once it is parsed. This
    takes about as much memory as the text.

    >>> most_values(b'{"a,b": [1, "\\\\", "\\"[,{"]}')
    5
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # then each quote begins or ends a string
    found, in_string = 1, False
    for begin in range(0, len(plain), _PART_BYTES):
        pieces = plain[begin : begin + _PART_BYTES].split(b'"')
        outside = b"".join(pieces[in_string::2])
        found += outside.count(b"{") + outside.count(b"[") + outside.count(b",")
        in_string ^= len(pieces) % 2 == 0
    return found


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
    return value
