"""Old module names. Importing a module by its old name still works, and warns with the new name.

``NEW_NAMES`` lists the old names of public modules: modules that examples, notebooks, jobs or documentation import. Other
modules are internal and may move without an entry in ``NEW_NAMES``; ``docs/decisions/renames.md`` lists their new names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NEW_NAMES = {
    "springtide.app": "springtide.api",
    "springtide.app.estimate": "springtide.planning.estimate",
    "springtide.app.plan": "springtide.planning.plan",
    "springtide.app.plan_rows": "springtide.planning.plan",
    "springtide.app.simulate": "springtide.planning.simulation",
    "springtide.corpus.patterns": "springtide.corpus.tokenizer",
    "springtide.dist": "springtide.distributed",
    "springtide.elastic.checkpoint_only": "springtide.elastic.simulate",
    "springtide.elastic.failures": "springtide.elastic.traces",
    "springtide.generation": "springtide.eval",
    "springtide.interop": "springtide.hf",
    "springtide.objective": "springtide.model.objective",
    "springtide.report": "springtide.run.report",
    "springtide.store": "springtide.storage",
    "springtide.track": "springtide.tracking",
}
"""Old name -> new name. In a renamed package each module keeps its own name: ``old.x`` becomes ``new.x``."""


def new_name(old: str) -> str:
    """Return the current name of the module ``old``; empty if ``NEW_NAMES`` does not cover it."""
    package, _, module = old.rpartition(".")
    return NEW_NAMES.get(old) or (f"{NEW_NAMES[package]}.{module}" if package in NEW_NAMES else "")


class _Renamed(MetaPathFinder, Loader):
    """Import hook that resolves an old name to the module with the new name, so that both names are one module."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        is_old = name.startswith("springtide.") and new_name(name)
        return importlib.util.spec_from_loader(name, self) if is_old else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        sys.modules[old] = importlib.import_module(new_name(old))
        warnings.warn(f"{old} is now {new_name(old)}", FutureWarning, stacklevel=2)


def install() -> None:
    """Make old names importable. The hook goes first: other finders would load the modules of a renamed package a second
    time."""
    if not any(isinstance(one, _Renamed) for one in sys.meta_path):
        sys.meta_path.insert(0, _Renamed())
