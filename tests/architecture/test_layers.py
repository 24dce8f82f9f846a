"""The package keeps its import rules, and each rule finds what breaks it. `make check` runs this file: it starts no process."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import layer_rules as rules
import long_code
import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "platform" / "springtide"
TESTS = REPOSITORY / "tests"
RULES = [
    rules.forbidden_imports,
    rules.forbidden_packages,
    rules.private_ray,
    rules.impure,
    rules.environment_readers,
    rules.raw_prints,
    rules.core_that_knows_a_feature,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Callable[[Path], list[str]]) -> None:
    assert rule(PACKAGE) == []


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (rules.forbidden_imports, "config/bad.py", "from springtide.storage import Folder"),
        (rules.forbidden_imports, "stream/bad.py", "def f():\n    import springtide.training.loop"),
        (rules.forbidden_imports, "model/bad.py", "from springtide import checkpoint"),
        (rules.forbidden_imports, "run/report/bad.py", "from springtide.run.folder import Run"),
        (
            rules.private_ray,
            "ray/bad.py",
            "from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError",
        ),
        (rules.private_ray, "ray/bad.py", "def f():\n    import ray._raylet"),
        (rules.impure, "elastic/bad.py", "import time\nnow = time.monotonic()"),
        (rules.impure, "tune/bad.py", "def f(name):\n    return open(name).read()"),
        (rules.impure, "model/bad.py", "import torch\ncuda = torch.cuda.is_available()"),
        (rules.impure, "config/bad.py", "import json\njson.encoder.FLOAT_REPR = repr"),
        (rules.impure, "stream/bad.py", "from springtide.stream import order\norder.CACHE = {}"),
        (rules.forbidden_packages, "training/bad.py", "import ray.data"),
        (rules.forbidden_packages, "tracking/journal.py", "def f():\n    from mlflow import MlflowClient"),
        (rules.forbidden_packages, "stream/bad.py", "from torch import nn"),
        (rules.environment_readers, "model/bad.py", "import os\nx = os.environ['A']"),
        (rules.raw_prints, "cli/bad.py", "f(say=print)"),
        (rules.raw_prints, "cli/bad.py", "import sys\nsys.stdout.write('a')"),
    ],
)
def test_a_rule_catches_what_breaks_it(rule: Callable[[Path], list[str]], file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    [found] = rule(tmp_path)
    assert file in found


@pytest.mark.parametrize(
    "text", ["def f():\n    from springtide.training.energy import Rapl", "\nfrom springtide.training import energy"]
)
def test_the_step_that_imports_a_part_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "energy.py").write_text("class EnergyMeter(Part):\n    pass\n")
    (tmp_path / "training" / "step.py").write_text(text)
    [found] = rules.core_that_knows_a_feature(tmp_path)
    assert found.startswith("training/step.py:2 imports springtide.training.energy")


def test_every_package_has_an_import_rule_and_is_on_the_map() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == {name for name in rules.MAY_IMPORT if "/" not in name}
    guide = (PACKAGE / "__init__.py").read_text()
    assert [name for name in sorted(packages) if f"{name}/" not in guide] == []


def test_platform_is_a_folder_and_no_package() -> None:
    """With an ``__init__.py`` it would shadow the standard library's ``platform``."""
    assert not (REPOSITORY / "platform" / "__init__.py").exists()


def test_no_package_below_training_takes_the_whole_config() -> None:
    """They take the sections that they read: the signature says which."""
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
    assert not taking & (rules.MAY_IMPORT["training"] - {"config"})


def test_notebooks_import_and_never_define() -> None:
    notebooks = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(re.search(r"^\s*(def|class) ", "".join(cell["source"]), re.MULTILINE) for cell in code)


def test_what_tests_share_is_in_programs() -> None:
    """A test module is importable only while pytest has read its folder: never by another."""
    own = {path.stem for path in TESTS.rglob("test_*.py")}
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not own & set(named), f"{path}:{getattr(node, 'lineno', 0)} imports a test module"


def test_names_of_test_files_are_unique() -> None:
    """Pytest imports a test file by its bare name: of two with one name it can collect the first alone."""
    files = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in files.items() if count > 1] == []


def test_long_files_and_functions_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("x = 1\n" * 801)
    (tmp_path / "function.py").write_text("def f():\n" + "    x = 1\n" * 100)
    assert len(list(long_code.long_code(tmp_path))) == 2
