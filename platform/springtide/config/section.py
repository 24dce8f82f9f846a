"""Base of every section of the config: frozen, without unknown names, each field documented.

A new field's default must train what was trained without it. A new field that is not free also needs a row in
``ADDED_SETTINGS`` of ``config/renames.py``: without the row, the identity of every older run would change, and ``--resume``
would not find it.
"""

from __future__ import annotations

import functools

from pydantic import BaseModel, ConfigDict, Field

free = functools.partial(Field, json_schema_extra={"free": True})
"""Marks a field that may change when a run is resumed."""

ahead = functools.partial(Field, json_schema_extra={"free": True, "ahead": True})
"""Marks a field that may change when a run is resumed, for steps that are not trained yet."""


class Section(BaseModel):
    """A frozen model that rejects unknown names; the doc line below a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
