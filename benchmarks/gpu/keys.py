"""The key of a stage: a hash of the code that it imports.

A stage that was measured stands for as long as its key does. So the key leaves out what cannot change a figure: import lines,
paths, comments and docstrings. Each top-level statement is hashed by itself and the hashes are sorted. A file that is moved,
split or merged keeps the key; a changed function changes it.

Imports are followed from the stage's file through springtide. Within springtide only imports at the top of a module are
followed: what a function imports is loaded only by those who need it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ROOTS = (HERE, HERE.parent, REPOSITORY / "platform")
"""Folders that modules are looked for in, in this order."""
PACKAGE = "springtide"


def key_of(stage: Path, programs: Iterable[str] = (), roots: tuple[Path, ...] = ROOTS) -> str:
    """Return 16 hex digits.

    Args:
        stage: the stage's file.
        programs: modules that the stage starts in another process.
        roots: folders that modules are looked for in.
    """
    hashes = sorted(one for path in files_of(stage, programs, roots) for one in _parsed(path, roots)[0])
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def files_of(stage: Path, programs: Iterable[str] = (), roots: tuple[Path, ...] = ROOTS) -> set[Path]:
    """Return the files that a stage imports, itself included; the arguments are those of ``key_of``."""
    waiting, found = [stage], set[Path]()
    waiting += [path for name in programs if (path := module_file(name, roots))]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [other for name in _parsed(path, roots)[1] for other in _files(name, roots)]
    return found


def module_file(name: str, roots: tuple[Path, ...] = ROOTS) -> Path | None:
    """Return the file of the module ``name``, as ``springtide.model``; None if no folder of ``roots`` has it."""
    for root in roots:
        base = root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def _files(name: str, roots: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that ``import name`` loads: the packages above it too."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if path := module_file(".".join(parts[:end]), roots):
            yield path


@functools.cache
def _parsed(path: Path, roots: tuple[Path, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hashes of a file's top-level statements, and the names of the modules it imports."""
    tree = ast.parse(path.read_text())
    is_ours = any(path.is_relative_to(root / PACKAGE) for root in roots)
    nodes = _at_top(tree) if is_ours else ast.walk(tree)
    names = [name for node in nodes for name in _imported(node)]
    statements = [ast.unparse(one) for one in _Code().visit(tree).body]
    hashes = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in statements)
    return tuple(hashes), tuple(names)


def _at_top(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported, without those for type checkers."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If):
            checks_types = "TYPE_CHECKING" in ast.unparse(node.test)
            waiting += node.orelse if checks_types else [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [*node.body, *node.orelse, *node.finalbody, *(one for h in node.handlers for one in h.body)]


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that one import statement names; of ``from a import b`` also ``a.b``, which may be one."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return []


class _Code(ast.NodeTransformer):
    """Take out imports, and every statement that is only a text."""

    def visit_Import(self, node: ast.Import) -> None:
        """Take it out."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Take it out."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Take out a docstring."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)
