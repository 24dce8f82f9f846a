"""Words for users in place of pydantic's messages about a bad value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORDS = {
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "dict_type": "is not a table of names and values",
    "finite_number": "is not a finite number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "has too many digits",
    "int_type": "is not a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "is not a list",
    "literal_error": "is not one of {expected}",
    "missing": "is missing",
    "model_type": "is not a table of names and values",
    "string_pattern_mismatch": "does not match the pattern {pattern}",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
    "string_type": "is not a text",
    "too_long": "has more than {max_length} values",
    "too_short": "has fewer than {min_length} values",
    "tuple_type": "is not a list",
    "value_error": "{error}",
}
"""Type of an error -> what is said; words in braces are of its context."""


def in_words(found: Mapping[str, Any]) -> str:
    """Return one finding of ``ValidationError.errors()`` as what follows the value in a message.

    Args:
        found: the finding, with type, message and context.

    Examples:
        >>> from springtide.config.problems import in_words
        >>> in_words({"type": "greater_than_equal", "msg": "Input should be ...", "ctx": {"ge": 1}})
        'must be at least 1'
        >>> in_words({"type": "of a later pydantic", "msg": "Input should be a date"})
        'Input should be a date'
    """
    words = _WORDS.get(found["type"], "")
    return words.format(**found.get("ctx", {})) if words else str(found["msg"])
