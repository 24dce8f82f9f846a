"""JSON that every reader takes: RFC 8259 has no NaN and no infinity, and browsers, jq and databases refuse them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """Return ``value`` as JSON, with null for numbers that are not finite. ``options`` as for ``json.dumps``.

    >>> to_json({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare: most values are finite
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
    return value
