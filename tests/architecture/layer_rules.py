"""The layer rules as functions from a source tree to what breaks them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "storage": {"config"},
    "events": {"config"},
    "corpus": {"config", "storage"},
    "shards": {"config", "storage"},
    "dataset": {"config", "storage", "corpus", "shards"},
    "stream": {"config", "storage", "shards"},
    "model": {"config", "shards"},
    "distributed": {"config", "model"},
    "checkpoint": {"config", "storage", "distributed"},
    "optim": {"config", "model", "distributed", "checkpoint"},
    "hf": {"config", "storage", "corpus", "shards", "model", "checkpoint"},
    "eval": {"config", "storage", "corpus", "shards", "dataset", "model", "checkpoint", "hf"},
    "elastic": {"config"},
    "preemption": set(),
    "tune": {"config", "storage", "events"},
    "tracking": {"config", "storage", "events"},
    "training": {
        *("config", "storage", "events", "corpus", "shards", "dataset", "stream", "model", "distributed"),
        *("checkpoint", "optim", "eval", "elastic", "preemption", "tracking"),
    },
    "run": {
        *(
            "config",
            "storage",
            "events",
            "shards",
            "stream",
            "checkpoint",
            "hf",
            "eval",
            "tune",
            "tracking",
            "training",
        ),
    },
    "run/report": {"config", "events", "tune", "tracking"},
    "planning": {
        *("config", "storage", "events", "shards", "model", "distributed", "checkpoint", "optim", "elastic"),
        *("tracking", "training", "run"),
    },
    "ray": {
        *("config", "storage", "events", "shards", "stream", "model", "distributed", "checkpoint", "eval", "elastic"),
        *("preemption", "tune", "tracking", "training"),
    },
    "api": {
        *("config", "storage", "events", "corpus", "shards", "dataset", "stream", "model", "distributed", "checkpoint"),
        *("optim", "eval", "elastic", "tune", "tracking", "training", "run", "planning", "ray"),
    },
    "cli": {
        *("config", "storage", "events", "shards", "dataset", "stream", "checkpoint", "eval", "elastic", "tune"),
        *("tracking", "run", "planning", "preemption", "api"),
    },
}
"""Package -> packages it may import; an arrow never turns back. A folder with a line of its own imports nothing else of its
package. ``errors`` and ``faults`` are everybody's."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("ray/",),
    "mlflow": ("tracking/mlflow_sink.py", "tracking/mlflow_client.py"),
    "torch": (
        "distributed/",
        "model/",
        "optim/",
        "training/",
        "checkpoint/",
        "hf/",
        "eval/",
        "ray/",
        "planning/step_memory.py",
    ),
    "tokenizers": ("corpus/tokenizer.py", "corpus/tokenizer_probe.py"),
    "transformers": ("hf/",),
    "safetensors": ("hf/",),
    "lm_eval": ("eval/harness.py",),
    "evaluate": ("eval/harness.py",),
    "fsspec": ("storage/",),
    "obstore": ("storage/s3.py",),
    "rich": ("tracking/console.py", "cli/"),
    "pandas": ("tracking/journal.py", "run/folder.py"),
    "huggingface_hub": ("corpus/hub.py",),
    "lingua": ("corpus/cleaning.py",),
    "jinja2": ("corpus/template_child.py",),
    "optuna": ("tune/search.py",),
    "torchao": ("distributed/float8.py",),
}
"""Package -> the files that may import it."""

EDGES = (
    *("api/tracking_server.py", "api/doctor.py", "training/__main__.py"),
    "ray/cluster/session.py",
    "corpus/chat_sandbox.py",  # passes the path of libraries to a child that gets nothing else
)
"""Where the environment is read, once a process."""

PURE: dict[str, tuple[str, ...]] = {
    "config": ("config/files.py", "config/code.py", "config/input_paths.py"),
    "elastic": (),
    "tune": ("tune/folder.py", "tune/space.py"),
    "stream": ("stream/data.py", "stream/batches.py", "stream/reader.py"),
    "model": ("model/source.py",),
}
"""Package whose values depend on its arguments alone -> its files at the edge, which may use files, clocks and processes."""


CORE = tuple(f"training/{name}.py" for name in ("step", "loop", "part", "message", "losses", "state"))
"""What knows no part of training by name."""
KNOWN_PARTS = {"requests", "teacher"}
"""Requests are what the loop is for; the file of the teacher also makes the objective, an argument of the computation."""


@functools.cache
def sources(package: Path) -> list[tuple[str, ast.Module]]:
    """(path below the package, syntax tree) of every file; all rules share one reading."""
    return [
        (path.relative_to(package).as_posix(), ast.parse(path.read_text())) for path in sorted(package.rglob("*.py"))
    ]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            if node.module in ("springtide", "springtide.training"):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def forbidden_imports(package: Path) -> list[str]:
    """Imports of a package that the layer rules do not allow."""
    found = []
    for file, tree in sources(package):
        if "/" not in file:
            continue
        folders = file.split("/")[:-1]
        inside = next(name for name in ("/".join(folders[:2]), folders[0]) if name in MAY_IMPORT)
        for line, module in imports(tree):
            parts = module.split(".")
            if parts[0] != "springtide" or len(parts) == 1 or parts[1] in {"errors", "faults"}:
                continue
            if parts[1 : 2 + inside.count("/")] == inside.split("/"):
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
        f"{file}:{line} imports {module}: import it from ray/_ray_private.py"
        for file, tree in sources(package)
        if file != "ray/_ray_private.py"
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


def raw_prints(package: Path) -> list[str]:
    """Uses of print, sys.stdout.write and sys.stderr.write in ``cli/``, where only ``output.say`` makes text printable."""
    found = []
    for file, tree in sources(package):
        if not file.startswith("cli/") or file == "cli/output.py":
            continue
        for node in ast.walk(tree):
            is_print = isinstance(node, ast.Name) and node.id == "print"
            is_write = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write")
            if is_print or is_write:
                found.append(f"{file}:{node.lineno} prints raw text: call cli.output.say")  # type: ignore[attr-defined]
    return found


def core_that_knows_a_feature(package: Path) -> list[str]:
    """Imports of a part by the step, the loop or what all parts share: ``training/parts.py`` lists them for those."""
    prefix = "springtide.training."
    features = {
        file.removeprefix("training/").removesuffix(".py")
        for file, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Part" for base in node.bases)
    }
    found = []
    for file, tree in sources(package):
        for line, name in imports(tree) if file in CORE else ():
            module = name.removeprefix(prefix).partition(".")[0]
            if name.startswith(prefix) and module in features - KNOWN_PARTS:
                found.append(f"{file}:{line} imports {name}, a part: the step and the loop know none by name")
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
