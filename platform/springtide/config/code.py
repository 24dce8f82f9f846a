"""Which code a run is trained by, and whether its config may name code to be run."""

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
    """16 hex digits over the source of this package."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def check_trusted(source: str, where: str, trust_code: bool) -> None:
    """ConfigError when the config in ``where``, which its reader has not written himself, names code to be run as its
    ``model.source`` and that was not allowed."""
    if source and not trust_code:
        module = source.partition(":")[0]
        raise ConfigError(
            explain(
                "model.source",
                source,
                f"is code that {where} names: module {module} would be imported and run, from {file_of(module)}",
                "read it, then say --trust-code (in Python: trust_code=True) if you trust who wrote it, or name it yourself",
            )
        )


def file_of(module: str) -> str:
    """The file that importing ``module`` would run, by the search path and, last, the current folder; nothing is imported."""
    known = getattr(sys.modules.get(module), "__file__", None)
    if known:
        return str(known)
    path, found = [*sys.path, os.getcwd()], ""
    for name in module.split("."):
        # by its last name alone: asked for a dotted one, Python would look at parents that were not imported
        spec = PathFinder.find_spec(name, path) if name else None
        if spec is None:
            return "no file that is there now"
        path = list(spec.submodule_search_locations or ())
        found = spec.origin or ", ".join(path)
    return found
