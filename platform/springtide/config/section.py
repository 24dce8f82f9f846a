"""The base of every section of the config: frozen, strict about names, each field documented."""

from __future__ import annotations

import functools

from pydantic import BaseModel, ConfigDict, Field

free = functools.partial(Field, json_schema_extra={"free": True})
"""A field that may change between restarts of one run."""

ahead = functools.partial(Field, json_schema_extra={"free": True, "ahead": True})
"""A field that may change between restarts of one run, for steps that are not trained yet."""


class Section(BaseModel):
    """A frozen model that rejects unknown names; the doc line below a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
