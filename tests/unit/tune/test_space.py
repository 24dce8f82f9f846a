"""Spaces are checked against the config's own types."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide import config as configs
from springtide.errors import ConfigError
from springtide.tune import applied, random_points, read_file, read_space
from springtide.tune.space import METRICS, read

TABLES = sorted((Path(__file__).parents[3] / "tune_spaces").glob("*.py"))
DEMO = configs.recipes.demo()
MIXED = DEMO.override({"stream.mixture": {"code": "/data/code", "prose": "/data/prose"}})


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_fits_the_config(path: Path) -> None:
    base = MIXED if path.stem == "mixture" else DEMO
    sweep = read_file(str(path), base)
    assert sweep.metric in METRICS
    assert len(random_points(sweep, base, seed=0)) == sweep.budget.trials


def test_the_weight_of_a_corpus_is_a_field() -> None:
    config = applied(MIXED, {"stream.weights.code": 3.0, "optim.peak_lr": 0.01})
    assert [dict(one.shares) for one in config.stream.weights] == [{"code": 3.0, "prose": 1.0}]
    assert config.optim.peak_lr == 0.01
    with pytest.raises(ConfigError, match=r"verse"):
        applied(MIXED, {"stream.weights.verse": 1.0})


def test_a_file_that_is_not_there_or_breaks_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--space = .*lr_and_decay\.py"):
        read_file(str(TABLES[0].with_name("lr_and_decy.py")), DEMO)
    (tmp_path / "broken.py").write_text("SPACE = {")
    with pytest.raises(ConfigError, match=r"\(SyntaxError"):
        read_file(str(tmp_path / "broken.py"), DEMO)


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


def test_mixture_weights_are_not_chosen_by_their_own_figure() -> None:
    """Weights of a mixture are not chosen by a figure that they weigh."""
    table = {"SPACE": {"stream.weights.code": ("uniform", 0.1, 1.0)}, "BUDGET": {"trials": 2, "tokens_per_trial": 1000}}
    with pytest.raises(ConfigError, match=r"OBJECTIVE.metric = 'heldout_loss'.*heldout_bits_per_byte_mean"):
        read({**table, "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"}}, MIXED)
