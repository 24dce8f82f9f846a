"""The layer rules as functions from a source tree to what breaks them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "store": {"config"},
    "events": {"config"},
    "faults": set(),
    "dist": {"config"},
    "corpus": {"config", "store"},
    "shards": {"config", "store"},
    "dataset": {"config", "store", "corpus", "shards"},
    "stream": {"config", "store", "shards"},
    "model": {"config"},
    "parallel": {"config", "dist", "model"},
    "objective": {"config", "shards", "model"},
    "checkpoint": {"config", "store", "faults", "dist"},
    "interop": {"config", "store", "corpus", "shards", "model", "checkpoint"},
    "generation": {"config", "store", "corpus", "shards", "dataset", "model", "checkpoint", "interop"},
    "elastic": {"config"},
    "preemption": {"elastic"},
    "tuning": {"config", "store", "events"},
    "track": {"config", "store", "events"},
    "report": {"config", "events", "track", "tuning"},
    "training": {
        *("config", "store", "events", "faults", "dist", "corpus", "shards", "dataset", "stream"),
        *("model", "parallel", "objective", "checkpoint", "generation", "elastic", "preemption", "track"),
    },
    "run": {
        *("config", "store", "events", "shards", "stream", "checkpoint", "interop", "generation", "tuning", "track"),
        *("report", "training"),
    },
    "on_ray": {
        *("config", "store", "events", "faults", "dist", "shards", "stream", "model", "parallel", "checkpoint"),
        *("generation", "elastic", "preemption", "tuning", "track", "training"),
    },
    "app": {
        *("config", "store", "events", "faults", "dist", "corpus", "shards", "dataset", "stream", "model", "parallel"),
        *("checkpoint", "generation", "elastic", "tuning", "track", "report", "training", "run", "on_ray"),
    },
    "cli": {
        "config",
        "generation",
        "store",
        "events",
        "stream",
        "elastic",
        "tuning",
        "track",
        "run",
        "app",
        "checkpoint",
        "dataset",
        "shards",
    },
}
"""Package -> packages it may import; an arrow never turns back. ``errors`` is everybody's."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("on_ray/",),
    "mlflow": ("track/mlflow_sink.py", "track/mlflow_client.py"),
    "torch": (
        "dist/",
        "model/",
        "parallel/",
        "objective/",
        "training/",
        "checkpoint/",
        "interop/",
        "generation/",
        "on_ray/",
    ),
    "tokenizers": ("corpus/tokenizer.py",),
    "transformers": ("interop/",),
    "safetensors": ("interop/",),
    "lm_eval": ("generation/harness.py",),
    "evaluate": ("generation/harness.py",),
    "fsspec": ("store/",),
    "obstore": ("store/s3.py",),
    "rich": ("track/console.py", "cli/"),
    "pandas": ("track/journal.py", "run/folder.py"),
    "huggingface_hub": ("corpus/hub.py",),
    "lingua": ("corpus/language.py",),
    "jinja2": ("corpus/template_child.py",),
    "optuna": ("tuning/study.py",),
    "torchao": ("parallel/float8.py",),
}
"""Package -> the files that may import it."""

EDGES = (
    *("app/train.py", "app/doctor.py", "training/__main__.py"),
    *("on_ray/cluster/session.py", "on_ray/cluster/connect.py"),
    "corpus/chat_sandbox.py",  # passes the path of libraries to a child that gets nothing else
)
"""Where the environment is read, once a process."""

PURE: dict[str, tuple[str, ...]] = {
    "config": ("config/files.py", "config/code.py"),
    "elastic": (),
    "tuning": ("tuning/folder.py", "tuning/space.py"),
    "stream": ("stream/data.py", "stream/batches.py", "stream/reader.py"),
    "model": ("model/source.py",),
}
"""Package whose values depend on its arguments alone -> its files at the edge, which may use files, clocks and processes."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources(package: Path) -> Iterator[tuple[str, ast.Module]]:
    """(path below the package, syntax tree) of every file."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            if node.module == "springtide":
                yield from ((node.lineno, f"springtide.{alias.name}") for alias in node.names)


def forbidden_imports(package: Path) -> list[str]:
    """Imports of a package that the layer rules do not allow."""
    found = []
    for file, tree in sources(package):
        inside = file.split("/")[0]
        if "/" not in file:
            continue
        for line, module in imports(tree):
            parts = module.split(".")
            if parts[0] != "springtide" or len(parts) == 1 or parts[1] in {inside, "errors"}:
                continue
            if parts[1] not in MAY_IMPORT[inside]:
                found.append(
                    f"{file}:{line} imports {module}: {inside} may import {sorted(MAY_IMPORT[inside]) or 'no package'}"
                )
    return found


def private_ray(package: Path) -> list[str]:
    """Imports of what Ray does not promise to keep, outside the one file for them."""
    private = re.compile(r"ray\.(_|cluster_utils|runtime_context|train\.v2|.*\._)")
    return [
        f"{file}:{line} imports {module}: import it from on_ray/_ray_private.py"
        for file, tree in sources(package)
        if file != "on_ray/_ray_private.py"
        for line, module in imports(tree)
        if private.match(module)
    ]


def forbidden_packages(package: Path) -> list[str]:
    """Imports of a package outside the files it is kept behind."""
    return [
        f"{file}:{line} imports {module}: only {', '.join(ONLY_IN[module.split('.')[0]])} may"
        for file, tree in sources(package)
        for line, module in imports(tree)
        if module.split(".")[0] in ONLY_IN and not file.startswith(ONLY_IN[module.split(".")[0]])
    ]


def environment_readers(package: Path) -> list[str]:
    """Uses of os.environ and os.getenv away from the edges."""
    return [
        f"{file}:{node.lineno} reads the environment: only {', '.join(EDGES)} may"
        for file, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"} and file not in EDGES
    ]


def too_long(package: Path) -> list[str]:
    """Files and functions that have outgrown what one holds in the head."""
    found = []
    for path in sorted(package.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{path.relative_to(package)} has {lines} lines, {MAX_FILE_LINES} are enough")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(package)}:{node.lineno} {node.name} has {lines} lines")
    return found


def undocumented(package: Path) -> list[str]:
    """Public modules, classes and functions without a docstring; properties and methods of a line or two need none."""
    found = []
    for file, tree in sources(package):
        if not ast.get_docstring(tree):
            found.append(f"{file} has no docstring")
        for parent in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for node in parent.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith(
                    "_"
                ):
                    continue
                small = parent is not tree and isinstance(node, ast.FunctionDef) and len(node.body) < 4
                is_event = isinstance(node, ast.ClassDef) and file in (
                    "events/steps.py",
                    "events/saves.py",
                    "events/controller.py",
                )
                tells = file.startswith("events/") and node.name == "describe"  # as Event.describe says
                if not ast.get_docstring(node) and not small and not is_event and not tells:
                    found.append(f"{file}:{node.lineno} {node.name} has no docstring")
    return found


def impure(package: Path) -> list[str]:
    """What reads or changes files, clocks, devices, processes or other modules in packages that are said to be pure."""
    outside = {"os", "pathlib", "time", "socket", "subprocess", "threading", "secrets", "tempfile", "shutil", "asyncio"}
    found = []
    for file, tree in sources(package):
        inside = file.split("/")[0]
        if inside not in PURE or file in PURE[inside]:
            continue
        used = {module.partition(".")[0]: line for line, module in imports(tree)}
        found += [f"{file}:{used[module]} imports {module}" for module in sorted(outside & used.keys())]
        names = set(used) | {alias.asname or alias.name for alias in _aliases(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"open", "print", "input"}:
                found.append(f"{file}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.Attribute) and node.attr in {"is_available", "device_count", "today", "utcnow"}:
                found.append(f"{file}:{node.lineno} asks for {ast.unparse(node)}")
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value).split(".")[0] in names
            ):
                found.append(f"{file}:{node.lineno} sets {ast.unparse(node)}")
    return found


def _aliases(tree: ast.Module) -> Iterator[ast.alias]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from node.names
