"""What every section of the config is: frozen, strict about names, and explained field by field."""

from __future__ import annotations

import functools

from pydantic import BaseModel, ConfigDict, Field

free = functools.partial(Field, json_schema_extra={"free": True})
"""A field that may change between restarts of one run."""

ahead = functools.partial(Field, json_schema_extra={"free": True, "ahead": True})
"""A field that may change between restarts of one run for the steps that are still to come."""


class Section(BaseModel):
    """Frozen, and strict about names; the doc line below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
