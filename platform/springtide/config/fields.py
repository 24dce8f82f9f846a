"""The config's leaf fields by their dotted names, as the command line and the saved files write them."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel

from springtide.config.schema import Config


def fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> pydantic field, for every leaf of ``section``."""
    leaves: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            leaves |= fields(field.annotation, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = field
    return leaves


@functools.cache
def is_free(name: str) -> bool:
    """Return whether the field of this dotted name may change when a run is resumed."""
    return bool(mark(fields()[name]))


def mark(field: Any) -> str:
    """Return "free" for a field that may change when a run is resumed, "ahead" if for the steps to come only, else nothing."""
    extra = field.json_schema_extra or {}
    return "ahead" if extra.get("ahead") else "free" if extra.get("free") else ""
