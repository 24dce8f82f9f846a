"""A JSON line of a corpus as a value, in bounded memory.

Parsed, ``{},{},...`` takes 26 times the memory of its text, and one emoji makes each character of a text take four bytes, in
the line and in what is parsed of it. So a long line is counted first, and parsed from its bytes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from springtide.storage import most_values

_SHORT_BYTES = 16 * 2**20
"""A line of this size is parsed as it is: that takes at most 610 MB."""
_MOST_VALUES = 2**19
"""Most values of a longer line."""


class BadLine(Exception):
    """A line that is not read; the message says why, for counting."""


def parse_line(line: bytes) -> Any:
    """Return the value of a JSON line. Parsing takes at most 610 MB for up to 64 MiB of text. In a short line, bytes that are
    not UTF-8 become U+FFFD.

    Raises:
        BadLine: it is not JSON, is nested too deeply, or is long and not UTF-8 or of many values.
    """
    try:
        if len(line) <= _SHORT_BYTES:
            return json.loads(line.decode("utf-8", errors="replace").strip())
        if most_values(line) <= _MOST_VALUES:
            return from_json(line, cache_strings="keys")
    except RecursionError:
        raise BadLine("nested too deeply") from None
    except ValueError:
        if len(line) <= _SHORT_BYTES:
            raise BadLine("not JSON") from None
    limits = f"not UTF-8 JSON of at most {_MOST_VALUES:,} values"
    raise BadLine(f"longer than {_SHORT_BYTES:,} bytes and {limits}")
