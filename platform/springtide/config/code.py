"""The fingerprint of the code that trains a run, and the check that a config may name code to run."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from springtide.errors import ConfigError, explain


@functools.cache
def code_fingerprint() -> str:
    """Hash the source of this package: 16 hex digits."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def check_trusted(source: str, where: str, trust_code: bool) -> None:
    """Raise ConfigError if the config in ``where`` names code to run (``source``, its ``model.source``) and ``trust_code`` is
    False. For configs that the user may not have written."""
    if source and not trust_code:
        module = source.partition(":")[0]
        raise ConfigError(
            explain(
                "model.source",
                source,
                f"is code that {where} names: module {module} would be imported and run, from {file_of(module)}",
                "read it, then pass --trust-code (in Python: trust_code=True) if you trust its author, or name it yourself",
            )
        )


def file_of(module: str) -> str:
    """Return the file that importing ``module`` would run, or a text that says there is none. Looks in the search path, then in
    the current folder; imports nothing."""
    known = getattr(sys.modules.get(module), "__file__", None)
    if known:
        return str(known)
    path, found = [*sys.path, os.getcwd()], ""
    for name in module.split("."):
        # one part of the name at a time: for a dotted name, find_spec expects the parents to be imported
        spec = PathFinder.find_spec(name, path) if name else None
        if spec is None:
            return "a file that does not exist now"
        path = list(spec.submodule_search_locations or ())
        found = spec.origin or ", ".join(path)
    return found
