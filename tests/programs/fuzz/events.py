"""Events with a value in every field."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from springtide.events import Event


def example(kind: type[Event], step: int) -> Event:
    """An event with a value in every field."""
    values: dict[str, Any] = {"time_s": 1.7e9 + step}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in ("time_s", "term"):
            continue
        hint = str(hints[field.name])
        plain = {"step": step, "status": "stopped", "digest": "00" * 8, "chain": "0" * 32, "name": "step-0000000005"}
        if field.name in plain:
            values[field.name] = plain[field.name]
        elif "list" in hint:
            values[field.name] = [0.25] if "float" in hint else ["a"] if "str" in hint else [1]
        elif "dict" in hint:
            values[field.name] = {"a": 0.25}
        elif "bool" in hint:
            values[field.name] = True
        elif "str" in hint:
            values[field.name] = "text"
        else:
            values[field.name] = 0.5 if "float" in hint else 2
    return kind(**values)
