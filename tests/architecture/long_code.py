"""Print files and functions that are long enough to look at again. A warning, not a limit: it always exits with 0."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILE_LINES = 800
FUNCTION_LINES = 100


def long_code(folder: Path) -> Iterator[str]:
    """Yield one line for each long file or function under a folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(folder.parent)
        if (lines := len(text.splitlines())) > FILE_LINES:
            yield f"{name}: {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


if __name__ == "__main__":
    for name in sys.argv[1:] or ("platform", "tests", "benchmarks"):
        for found in long_code(REPOSITORY / name):
            print(f"long: {found}")
