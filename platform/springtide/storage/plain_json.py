"""Write JSON without NaN and infinity, and count the values in untrusted JSON text before it is parsed.

RFC 8259 has no NaN and no infinity; browsers, jq and databases refuse them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_PART_BYTES = 2**16


def to_json(value: Any, **options: Any) -> str:
    """Return ``value`` as JSON, with null in place of numbers that are not finite. ``options``: passed to ``json.dumps``.

    >>> to_json({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare: most values are finite
        return json.dumps(_finite(value), allow_nan=False, **options)


def most_values(text: bytes) -> int:
    r"""Return an upper bound of the number of values in JSON text: opening brackets and commas outside of strings, plus one.

    The three bytes ``{},`` take about 70 bytes of memory once parsed, so a hostile file of moderate size may exhaust memory.
    This count takes about as much memory as the text.

    >>> most_values(b'{"a,b": [1, "\\\\", "\\"[,{"]}')
    5
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escapes, each quote begins or ends a string
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
