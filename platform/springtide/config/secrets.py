"""Remove passwords from a config's URLs, so that it may be shown or sent."""

from __future__ import annotations

from typing import Any

from springtide.config.files import build, flatten
from springtide.config.schema import Config
from springtide.errors import redacted


def redact(config: Config) -> Config:
    """Return a copy without the passwords, tokens and signatures in URLs. It is a valid config, but its URLs may be refused."""
    return build(_without(config.model_dump(mode="json")))


def secret_fields(config: Config) -> list[str]:
    """Return the dotted names of the fields that hold a password, token or signature."""
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
