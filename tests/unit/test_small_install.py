"""What works where only ``pip install springtide`` was run: without Ray, MLflow and what only they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import springtide as st
from springtide import config as configs
from springtide.config import Config

pytestmark = pytest.mark.processes

# find_spec and import alike say that these are not there
_WITHOUT = """
import importlib.abc, importlib.machinery, json, runpy, sys
ABSENT = {"ray", "mlflow", "pandas", "optuna", "sklearn", "scipy", "matplotlib"}
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ABSENT else found(name, package)
"""
_MODULE = """
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_COMMANDS = """
from springtide.cli.main import main
print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, "-c", _WITHOUT + program, *arguments]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(done, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.fixture
def config(tiny: Config, tmp_path: Path) -> Path:
    changes = {"run.id": "small", "train.total": 12 * 64 * 4, "optim.warmup": 0, "elastic.max_workers": 1}
    path = tmp_path / "config.yaml"
    path.write_text(configs.dump(tiny.override(changes)))
    return path


def test_a_run_trains_and_is_proved_without_ray_and_mlflow(config: Path, tiny: Config) -> None:
    trained = run(_MODULE, "springtide.training", "--config", str(config))
    assert trained.returncode == 0, trained.stderr[-3000:]
    folder = f"{tiny.run.root}/small"
    assert len(st.open_run(folder).steps) == 4
    done = run(_COMMANDS, json.dumps([["verify", folder], ["report", folder], ["inspect", folder]]))
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, 0], done.stderr[-3000:]


def test_what_needs_ray_says_so(config: Path) -> None:
    refused = run(_MODULE, "springtide.cli.main", "train", "--config", str(config))
    assert refused.returncode == 2
    assert "pip install 'springtide[ray]'" in refused.stderr
    assert "Traceback" not in refused.stderr
