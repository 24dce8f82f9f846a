"""What a rule makes of a document's text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Verdict(NamedTuple):
    """A text that is kept, perhaps changed, or the reason why it is dropped."""

    text: str
    """Empty if it is dropped."""
    reason: str = ""
    """The rule that drops it; empty if it is kept."""
    edits: Mapping[str, int] = MappingProxyType({})
    """What rules changed in the text -> how often, such as lines removed."""
