"""When a run may train (``train.only_when``): ``hours 22-6, battery 30, temperature 80``."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from springtide.errors import explain

_FIELD = "train.only_when"
_FORMS = {
    "hours": re.compile(r"hours\s+(\d{1,2})\s*-\s*(\d{1,2})"),
    "battery": re.compile(r"battery\s+(\d{1,3})"),
    "temperature": re.compile(r"temperature\s+(\d{1,3})"),
}
_REMEDY = "write such as 'hours 22-6, battery 30, temperature 80', each at most once"


class OnlyWhen(NamedTuple):
    """Conditions under which a run trains. All conditions must hold; a condition that is None is not checked."""

    hours: tuple[int, int] | None = None
    """Train from the first to the second of these full hours, by the machine's clock. If the second is smaller, as in (22, 6),
    train through midnight."""
    battery: int | None = None
    """Lowest charge at which to train, unless the machine is plugged in [%]."""
    temperature: int | None = None
    """Train only while the hottest sensor is below this [degrees Celsius]."""


def only_when(text: str) -> OnlyWhen:
    """Parse the conditions in ``text``; ValueError if it cannot be parsed.

    Examples:
        >>> only_when("hours 22-6, battery 30")
        OnlyWhen(hours=(22, 6), battery=30, temperature=None)
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = part.split()[0]
        read = _FORMS[name].fullmatch(part) if name in _FORMS and name not in found else None
        if read is None:
            raise ValueError(explain(_FIELD, text, f"{part!r} is not a condition, or repeats one", _REMEDY))
        found[name] = tuple(map(int, read.groups()))
    begin, end = found.get("hours", (0, 1))
    if begin == end or max(begin, end) > 24:
        raise ValueError(explain(_FIELD, text, "hours must be two different full hours, 0 to 24", _REMEDY))
    (battery,), (temperature,) = found.get("battery", (None,)), found.get("temperature", (None,))
    if battery is not None and not 0 < battery <= 95:
        raise ValueError(explain(_FIELD, text, "battery must be 1 to 95 %", _REMEDY))
    if temperature is not None and not 30 <= temperature <= 120:
        raise ValueError(explain(_FIELD, text, "temperature must be 30 to 120 degrees Celsius", _REMEDY))
    return OnlyWhen((begin, end) if "hours" in found else None, battery, temperature)


def _checked(text: str) -> str:
    only_when(text)
    return text


OnlyWhenText = Annotated[str, AfterValidator(_checked)]
"""Type of a setting whose text ``only_when`` can parse, such as ``hours 22-6, battery 30``."""
