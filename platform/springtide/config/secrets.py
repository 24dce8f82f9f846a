"""Configs that may be shown or sent: without the passwords of their URLs."""

from __future__ import annotations

from typing import Any

from springtide.config.files import build, flatten
from springtide.config.schema import Config
from springtide.errors import redacted


def redact(config: Config) -> Config:
    """A copy without the passwords, tokens and signatures of URLs; it is a config like any other, that reaches less."""
    return build(_without(config.model_dump(mode="json")))


def secret_fields(config: Config) -> list[str]:
    """Dotted names of the fields that have one."""
    return [name for name, value in flatten(config).items() if _without(value) != value]


def _without(value: Any) -> Any:
    match value:
        case str():
            return redacted(value)
        case list():
            return [_without(one) for one in value]
        case dict():
            return {key: _without(one) for key, one in value.items()}
    return value
