"""Amounts with units, such as ``2M`` tokens, ``64MiB`` and ``10m``, which are plain numbers once parsed; and deadlines."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_TIME = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class _Amount:
    unit: ClassVar[str]
    suffixes: ClassVar[dict[str, Any]]
    most: ClassVar[float] = math.inf

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse a number or a text such as ``1.5B``; ValueError names the known suffixes."""
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"is not an amount of {cls.unit}")
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in cls.suffixes:
                known = ", ".join(suffix for suffix in cls.suffixes if suffix)
                raise ValueError(f"is not an amount of {cls.unit}: a number, optionally followed by one of {known}")
            value = float(match[1]) * cls.suffixes[match[2]]
        try:
            is_finite = math.isfinite(value)
        except OverflowError:  # an integer too large for a float
            is_finite = False
        if not is_finite:
            raise ValueError(f"is not a finite amount of {cls.unit}")
        if issubclass(cls, int) and value != int(value):
            raise ValueError(f"is not a whole number of {cls.unit}")
        if value > cls.most:
            raise ValueError(f"is more than {cls.most:.0f} {cls.unit}")
        return cls(value)  # type: ignore[call-arg]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = core_schema.int_schema(ge=0) if issubclass(cls, int) else core_schema.float_schema(ge=0)
        plain = int if issubclass(cls, int) else float
        return core_schema.no_info_before_validator_function(
            cls.parse,
            core_schema.no_info_after_validator_function(cls, number),
            serialization=core_schema.plain_serializer_function_ser_schema(plain),
        )


class Tokens(_Amount, int):
    """A number of tokens; ``k``, ``M``, ``B``, ``T`` are powers of a thousand."""

    unit = "tokens"
    suffixes = _DECIMAL


class Bytes(_Amount, int):
    """A number of bytes; ``MB`` is 10**6, ``MiB`` is 2**20."""

    unit = "bytes"
    suffixes = _BINARY


class Seconds(_Amount, float):
    """A span of time in seconds, at most ten years; ``ms``, ``s``, ``m``, ``h``, ``d``."""

    unit = "seconds"
    suffixes = _TIME
    most = 3650 * 86400.0  # timers overflow at 9e9 s, and the longest wait is 12 x ``elastic.hang``


class Flops(_Amount, float):
    """Floating-point operations per second; ``989T`` is 989e12."""

    unit = "FLOP/s"
    suffixes = _DECIMAL


class Until(str):
    """A deadline: a span of time such as ``8h``, or a point in time such as ``2026-12-01T08:00Z``.

    >>> Until.parse("8h").at_s(begun_s=1000.0), Until.parse("1970-01-02T01:00+01:00").at_s(begun_s=1000.0)
    (29800.0, 86400.0)
    >>> Until.parse(0).is_set
    False
    """

    __slots__ = ()

    @classmethod
    def parse(cls, value: Any) -> Until:
        """Parse a span like ``Seconds``, or a time in ISO 8601 with its offset from UTC."""
        if isinstance(value, Until):
            return value
        if isinstance(value, str) and re.match(r"\s*\d{4}-\d", value):
            try:
                value = datetime.datetime.fromisoformat(value.strip())
            except ValueError:
                raise ValueError("is not a time such as 2026-12-01T08:00Z") from None
        if isinstance(value, datetime.datetime):  # also if YAML parsed the value as a time
            if value.tzinfo is None:
                raise ValueError("has no offset from UTC; write 2026-12-01T08:00Z or 2026-12-01T09:00+01:00")
            return cls(value.isoformat())
        if isinstance(value, datetime.date):
            raise ValueError("is a day without a time; write 2026-12-01T08:00Z")
        return cls(f"{float(Seconds.parse(value)):.12g}s")

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline; a span of 0 means none."""
        return str(self) != "0s"

    def at_s(self, begun_s: float) -> float:
        """Return the deadline in seconds since 1970; a span counts from ``begun_s``."""
        if str(self).endswith("s"):
            return begun_s + Seconds.parse(str(self))
        return datetime.datetime.fromisoformat(self).timestamp()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            cls.parse,
            core_schema.no_info_after_validator_function(cls, core_schema.str_schema()),
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )
