"""The settings of a run. Layer rule: frozen values that validate themselves. Files are read only on request, the environment is
never read, and no other package is imported."""

from springtide.config import recipes
from springtide.config.code import check_trusted, code_fingerprint
from springtide.config.files import (
    RUN_CONFIG,
    build,
    build_stored,
    changes_the_run,
    check_nothing_lost,
    check_same_run,
    difference,
    dump,
    fingerprint,
    flatten,
    load_config,
    nearest,
    parse,
    recipe,
    redact,
    secret_fields,
)
from springtide.config.quantities import Bytes, Seconds, Tokens
from springtide.config.schema import Config

__all__ = [
    "RUN_CONFIG",
    "Bytes",
    "Config",
    "Seconds",
    "Tokens",
    "build",
    "build_stored",
    "changes_the_run",
    "check_nothing_lost",
    "check_same_run",
    "check_trusted",
    "code_fingerprint",
    "difference",
    "dump",
    "fingerprint",
    "flatten",
    "load_config",
    "nearest",
    "parse",
    "recipe",
    "recipes",
    "redact",
    "secret_fields",
]
