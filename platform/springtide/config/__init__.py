"""The words all else is written in. Law: frozen values, checked where they live; nothing here reads a file unasked,
the environment, or another room."""

from springtide.config import recipes
from springtide.config.amounts import Bytes, Seconds, Tokens
from springtide.config.files import (
    build,
    changes_the_run,
    difference,
    dump,
    fingerprint,
    flatten,
    load,
    override,
    recipe,
)
from springtide.config.schema import Config

__all__ = [
    "Bytes",
    "Config",
    "Seconds",
    "Tokens",
    "build",
    "changes_the_run",
    "difference",
    "dump",
    "fingerprint",
    "flatten",
    "load",
    "override",
    "recipe",
    "recipes",
]
