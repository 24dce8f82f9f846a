"""A machine that has torch and no Ray: data is prepared and a model trains under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.storage import Folder
from springtide.tracking.journal import last_steps, read_journal

pytestmark = pytest.mark.processes

MISSING = ("ray", "mlflow", "pandas", "scipy", "obstore", "s3fs", "optuna", "sklearn")
"""None of them is among the wheels that ``make gpu-wheels`` gathers."""

HIDE = f"""
import sys
class Hide:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {MISSING} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hide, sys.meta_path)
"""
PREPARE = """
import sys
from springtide import config as configs
from springtide.dataset import make_dataset
config = configs.load_config(sys.argv[1])
url = make_dataset(config.corpus, config.shards)
open(sys.argv[1], "w").write(configs.dump(config.override({"shards.dataset": url})))
"""


@pytest.mark.full
def test_torchrun_trains_where_only_torch_and_the_wheels_are(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)  # every process below imports it first, the writing one too
    changes = {
        "run.id": "alone",
        "run.root": str(tmp_path / "runs"),
        "shards.root": str(tmp_path / "datasets"),
        "corpus.max_files": 12,
        "corpus.near_duplicates": False,
        "train.total": 4 * 12 * 64,
        "optim.warmup": 12 * 64,
        "checkpoint.every_steps": 2,
    }
    config = configs.recipes.tiny().override(changes)
    file = tmp_path / "config.yaml"
    file.write_text(configs.dump(config))
    path = os.pathsep.join([str(tmp_path), str(Path(configs.__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    hidden = run("-c", "import ray")
    assert "No module named 'ray'" in hidden.stderr
    prepared = run("-c", PREPARE, str(file))
    assert prepared.returncode == 0, prepared.stderr[-3000:]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    trained = run(*launch, "-m", "springtide.training", "--config", str(file))
    assert trained.returncode == 0, trained.stderr[-3000:]
    steps = last_steps(read_journal(Folder(str(tmp_path / "runs" / "alone"))))
    assert [one.step for one in steps] == [1, 2, 3, 4]
