"""Spaces are checked against the config's own types."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.errors import ConfigError
from springtide.sweep import read_space
from springtide.track.metrics import EVAL_METRICS, STEP_METRICS

TABLES = sorted((Path(__file__).parents[3] / "tune_spaces").glob("*.py"))
DEMO = configs.recipes.demo()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_fits_the_config(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert len(read_space(table.SPACE, DEMO)) == len(table.SPACE)
    assert table.OBJECTIVE["metric"] in STEP_METRICS | EVAL_METRICS
    assert table.OBJECTIVE["mode"] in {"min", "max"}
    assert table.BUDGET["trials"] > 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optim.peek_lr": ("uniform", 0.1, 0.2)}, "did you mean 'optim.peak_lr'"),
        ({"optim.peak_lr": ("log_unifrom", 0.1, 0.2)}, "did you mean 'log_uniform'"),
        ({"optim.peak_lr": ("uniform", 0.2, 0.1)}, "low < high"),
        ({"optim.peak_lr": ("log_uniform", 0.0, 0.1)}, "above 0"),
        ({"optim.final_lr_ratio": ("uniform", 0.5, 1.5)}, r"optim.final_lr_ratio = 1.5"),
        ({"stream.lanes": ("choice", 4, 5)}, "must divide"),
    ],
)
def test_what_the_config_refuses_is_refused_before_anything_runs(table: dict[str, tuple], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_space(table, DEMO)
