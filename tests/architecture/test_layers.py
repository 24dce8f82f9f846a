"""The house as it stands keeps its rules, and each rule catches what breaks it."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import layer_rules as rules
import public_words
import pytest

from springtide.config.fields import fields
from springtide.events import EVENTS, Evaluated, StepDone
from springtide.events.metrics import EVAL_METRICS, EXTRA_METRICS, STEP_METRICS
from springtide.track.ledger import KINDS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "platform" / "springtide"
RULES = [
    rules.forbidden_imports,
    rules.forbidden_packages,
    rules.private_ray,
    rules.impure,
    rules.environment_readers,
    rules.raw_prints,
    rules.too_long,
    rules.undocumented,
]
TOP_LEVEL = {
    *(
        "pyproject.toml",
        "platform",
        "jobs",
        "tune_spaces",
        "tests",
        "cluster.yaml",
        "notebooks",
        "benchmarks",
        "docs",
        ".ci",
        ".github",
        "examples",
        "deploy",
    ),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".gitignore"),
    *("SECURITY.md", "CITATION.cff", ".pre-commit-config.yaml", ".rayignore", "mkdocs.yml"),
}
UNITS = {
    *(
        "1",
        "blocks",
        "bytes",
        "checkpoints",
        "copies",
        "cpus",
        "documents",
        "dollars/h",
        "epochs",
        "failures",
        "features",
        "flag",
        "gpus",
        "heads",
        "ids",
    ),
    *(
        "lanes",
        "name",
        "name or path",
        "ratio",
        "row groups",
        "rows",
        "s",
        "steps",
        "table",
        "files",
        "characters",
        "urls",
        "tasks",
        "threads",
        "tries",
        "tokens",
        "type",
    ),
    *("url", "workers"),
}


def tracked() -> list[Path]:
    """Files of the repository, those git would take included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in names if (path := REPOSITORY / name).is_file()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Callable[[Path], list[str]]) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (rules.forbidden_imports, "config/bad.py", "from springtide.store import Folder"),
        (rules.forbidden_imports, "stream/bad.py", "def f():\n    import springtide.training.loop"),
        (rules.forbidden_imports, "model/bad.py", "from springtide import checkpoint"),
        (
            rules.private_ray,
            "on_ray/bad.py",
            "from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError",
        ),
        (rules.private_ray, "on_ray/bad.py", "def f():\n    import ray._raylet"),
        (rules.impure, "elastic/bad.py", "import time\nnow = time.monotonic()"),
        (rules.impure, "tuning/bad.py", "def f(name):\n    return open(name).read()"),
        (rules.impure, "model/bad.py", "import torch\ncuda = torch.cuda.is_available()"),
        (rules.impure, "config/bad.py", "import json\njson.encoder.FLOAT_REPR = repr"),
        (rules.impure, "stream/bad.py", "from springtide.stream import order\norder.CACHE = {}"),
        (rules.forbidden_packages, "training/bad.py", "import ray.data"),
        (rules.forbidden_packages, "track/journal.py", "def f():\n    from mlflow import MlflowClient"),
        (rules.forbidden_packages, "stream/bad.py", "from torch import nn"),
        (rules.environment_readers, "model/bad.py", "import os\nx = os.environ['A']"),
        (rules.raw_prints, "cli/bad.py", "f(say=print)"),
        (rules.raw_prints, "cli/bad.py", "import sys\nsys.stdout.write('a')"),
        (rules.too_long, "model/bad.py", "x = 1\n" * 401),
        (rules.too_long, "model/bad.py", "def f():\n" + "    x = 1\n" * 61),
        (rules.undocumented, "model/bad.py", '"""Fine."""\ndef f():\n    pass'),
        (rules.undocumented, "model/bad.py", "x = 1"),
    ],
)
def test_a_rule_catches_what_breaks_it(rule: Callable[[Path], list[str]], file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    [found] = rule(tmp_path)
    assert file in found


def test_every_package_has_its_layer_states_its_rule_and_is_on_the_map() -> None:
    packages = {path.parent.name: path.read_text() for path in PACKAGE.glob("*/__init__.py")}
    assert packages.keys() == rules.MAY_IMPORT.keys()
    assert [name for name, text in packages.items() if not re.search(r"(Rule|Layer rule): ", text)] == []
    guide = (PACKAGE / "__init__.py").read_text()
    assert [name for name in packages if f"{name}/" not in guide] == []


def test_the_top_level_is_what_was_agreed() -> None:
    assert {path.relative_to(REPOSITORY).parts[0] for path in tracked()} <= TOP_LEVEL


def test_platform_is_a_folder_and_no_package() -> None:
    assert not (REPOSITORY / "platform" / "__init__.py").exists()
    assert {path.relative_to(REPOSITORY).parts[1] for path in tracked() if "platform" in path.parts} == {"springtide"}


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {part for path in tracked() for part in path.with_suffix("").relative_to(REPOSITORY).parts}
    assert names.isdisjoint({"utils", "util", "common", "helpers", "manager", "misc"})


def test_notebooks_import_and_never_define() -> None:
    notebooks = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(re.search(r"^\s*(def|class) ", "".join(cell["source"]), re.MULTILINE) for cell in code)


def test_no_path_of_one_machine_is_written_down() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
    guilty = [
        path for path in tracked() if path.suffix not in {".svg"} and pattern.search(path.read_text(errors="ignore"))
    ]
    assert [path.name for path in guilty if path != Path(__file__)] == []


@pytest.mark.parametrize("module", ["springtide", "springtide.config", "springtide.stream", "springtide.elastic"])
def test_what_is_light_stays_light(module: str) -> None:
    program = f"import {module}, sys; print([name for name in ('torch', 'ray', 'mlflow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_loads_no_arrays_before_a_command_runs() -> None:
    heavy = ("numpy", "pyarrow", "pydantic", "torch", "yaml")
    program = f"import springtide.cli.main, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_public_name_is_the_same_whatever_was_imported_before() -> None:
    program = """
import springtide as st
before = {name: getattr(st, name) for name in st.__all__}
import springtide.app.sweep, springtide.app.train, springtide.tuning, springtide.training
assert before == {name: getattr(st, name) for name in st.__all__}
assert callable(st.train) and callable(st.sweep)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_loop_needs_no_ray() -> None:
    program = "import springtide.training.__main__, sys; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False True"


def test_every_field_has_a_doc_line_that_ends_with_its_unit() -> None:
    for name, field in fields().items():
        match = re.search(r"\[([^\]]+)\]\.$", field.description or "")
        assert match, name
        assert match[1] in UNITS, f"{name}: {match[1]}"


def test_metrics_are_those_of_the_events_and_their_names_agree_with_their_units() -> None:
    def figures(event: type) -> set[str]:
        ours = {
            "step",
            "step_tokens",
            "time_s",
            "term",
            "rows",
            "corpora",
            "losses",
            "forgetting",
            "asynchronous",
            "digest",
            "updated",
            "extra",
        }
        return {field.name for field in dataclasses.fields(event)} - ours

    assert figures(StepDone) == STEP_METRICS.keys()
    assert figures(Evaluated) - {"tokens"} == EVAL_METRICS.keys()
    for name, metric in (STEP_METRICS | EXTRA_METRICS | EVAL_METRICS).items():
        if name.endswith("_per_s"):
            assert metric.unit.endswith("/s"), name
        elif name.endswith("_s"):
            assert metric.unit == "s", name
        if name.endswith("_bytes"):
            assert metric.unit == "bytes", name


def test_every_event_is_charged_to_a_kind_of_time() -> None:
    assert {event.charged_to for event in EVENTS.values()} <= set(KINDS)


def test_the_readme_names_the_two_commands() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    run = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert [line.split("#")[0].strip() for line in run if line.startswith("make")] == ["make demo", "make test"]


def test_what_the_demo_and_the_tests_leave_in_a_clone_is_ignored_and_changes_no_rule(tmp_path: Path) -> None:
    left = ["runs/run/config.yaml", "datasets/it/manifest.json", "mlruns/0/meta.yaml", ".flaky/it/round-01/result.json"]
    ignored = subprocess.run(
        ["git", "check-ignore", *left], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ignored.stdout.splitlines() == left
    # a folder of the name of a package in the root is no reason to sort its import as ours
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for folder in ("platform", "tests"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", str(tmp_path)]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_what_tests_share_is_in_programs() -> None:
    """A test module is importable only while pytest has read its folder: never by another."""
    own = {path.stem for path in (REPOSITORY / "tests").rglob("test_*.py")}
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not own & set(named), f"{path}:{getattr(node, 'lineno', 0)} imports a test module"


def test_every_test_file_has_a_name_of_its_own() -> None:
    """One run of pytest takes all folders, which are no packages: two files of one name are one module."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_words_of_public_names_are_on_the_list() -> None:
    """A word that is new is chosen on purpose: on the list if it is the field's, in the glossary if it is ours."""
    glossary = (REPOSITORY / "docs" / "glossary.md").read_text().lower()
    known = {*public_words.LIST.read_text().split(), *re.findall(r"[a-z]+", glossary)}
    new = {word: where for word, where in public_words.words().items() if word not in known}
    assert new == {}, "python tests/architecture/public_words.py adds them"


def test_the_training_loop_stays_small() -> None:
    """What takes part in steps is a hook; what a step changes is in the state."""
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text())
    [loop] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainLoop"]
    declared = {
        node.target.id for node in loop.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    written = {
        node.attr
        for node in ast.walk(loop)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert len(declared | written) <= 12, sorted(declared | written)


def test_little_of_what_calls_ray_is_untyped() -> None:
    """Ray's public types, our actors' own and ``object`` say more than ``Any``."""
    files = sorted((PACKAGE / "on_ray").rglob("*.py"))
    found = {path.name: n for path in files if (n := len(re.findall(r"\bAny\b", path.read_text())))}
    assert sum(found.values()) < 40, found


def test_few_packages_take_the_whole_config_and_none_below_training() -> None:
    """What needs some settings takes their sections: then its signature says which."""
    taking = set()
    for file, tree in rules.sources(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "/" in file:
                names = [
                    ast.unparse(one.annotation)
                    for one in ast.walk(node.args)
                    if isinstance(one, ast.arg) and one.annotation
                ]
                if any(re.search(r"(^|\W)Config($|\W)", name) for name in names):
                    taking.add(file.split("/")[0])
    below = set(rules.MAY_IMPORT["training"]) - {"config"}
    assert not taking & below, taking & below
    assert len(taking) <= 8, taking
