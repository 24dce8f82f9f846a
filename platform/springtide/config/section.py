"""Base class of every section of the config: frozen, rejects unknown names, documents each field.

When you add a field, its default must train as before. If the field is not ``free`` (free: may change when a run is resumed),
also add a row to ``ADDED_SETTINGS`` of ``config/renames.py``. Without the row, the identity (hash) of every older run would
change, and ``--resume`` would not find the run.
"""

from __future__ import annotations

import functools

from pydantic import BaseModel, ConfigDict, Field

free = functools.partial(Field, json_schema_extra={"free": True})
"""Marks a field that may change when a run is resumed."""

ahead = functools.partial(Field, json_schema_extra={"free": True, "ahead": True})
"""Marks a field, such as a schedule over steps, whose values may change when a run is resumed, but only for steps that are not
trained yet."""


class Section(BaseModel):
    """A frozen pydantic model that rejects unknown field names. The docstring below a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
