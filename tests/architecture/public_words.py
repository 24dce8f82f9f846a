"""The words of public names, for the word list: ``python tests/architecture/public_words.py`` writes it anew.

A word that is new belongs there, or in docs/glossary.md if it is ours: read the list's change before you commit it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("words.txt")
PACKAGE = Path(__file__).parents[2] / "platform" / "springtide"
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def names(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines for others: functions and their arguments, classes and their fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            if not node.name.startswith("_") or node.name == "__init__":
                yield from (one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )


def words() -> dict[str, str]:
    """Word -> a place where it stands."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in [path.stem, *names(ast.parse(path.read_text()))]:
            if not name.startswith("_"):
                for word in _WORD.findall(name):
                    found.setdefault(word.lower(), f"{path.relative_to(PACKAGE)}: {name}")
    return found


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(words())) + "\n")
