"""Any nn.Module trains as ours does: sharded, resized, saved, sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import train, train_laid_out
from prepared import prepare

from springtide import config as configs
from springtide.api import train as app
from springtide.config import Config
from springtide.config.code import find_code
from springtide.errors import ConfigError
from springtide.events import Event, Started, StepDone
from springtide.model import make
from springtide.planning.step_memory import predicted_bytes
from springtide.run.folder import open_run
from springtide.storage import Folder

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("own")
    changes = {
        "model.source": "own_model:build",
        "model.num_layers": 2,
        "run.root": f"{root}/runs",
        "shards.root": f"{root}/datasets",
        "corpus.max_files": 20,
        "train.total": STEPS * 12 * 64,
        "train.eval_tokens": 0,
        "checkpoint.every_steps": 0,
    }
    return prepare(configs.recipes.tiny().override(changes))


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]


@pytest.mark.full
def test_a_model_of_ones_own_learns_the_same_on_any_workers_and_writes(config: Config, ranks: Ranks) -> None:
    [alone] = ranks(1, train, config.override({"run.id": "alone"}))
    assert isinstance(alone[0], Started)
    assert alone[0].flops_per_token > 0
    assert losses(alone)[-1] < losses(alone)[0] - 0.3

    changed = config.override({"run.id": "resized", "parallel.recompute": "full"})
    first = ranks(3, train, changed, 8)[0]
    second = ranks(2, train_laid_out, changed.override({"parallel.strategy": "zero1"}))[0]
    assert losses(first + second) == pytest.approx(losses(alone), abs=5e-5)

    folder = Folder(changed.run.root) / "resized"
    folder.write(configs.RUN_CONFIG, configs.dump(changed))
    assert len(app.sample(open_run(folder.url), tokens=5, trust_code=True).text) >= 1


def test_what_returns_no_logits_ends_with_what_it_returned(config: Config, ranks: Ranks) -> None:
    changed = config.override({"run.id": "headless", "model.source": "own_model:headless"})
    with pytest.raises(AssertionError, match=r"TrainingFailed: the model returned .* return logits \(6, 64, ids\)"):
        ranks(1, train, changed)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("own_model", "is not package.module:function"),
        ("own_modle:build", "cannot be imported"),
        ("own_model:bulid", "cannot be imported"),
        ("own_model:__name__", "is not a function"),
    ],
)
def test_a_source_that_is_none_is_told_before_anything_starts(
    config: Config, tmp_path: Path, source: str, problem: str
) -> None:
    changed = config.override({"model.source": source, "run.root": str(tmp_path)})
    with pytest.raises(ConfigError, match=f"model.source = '{source}': {problem}"):
        app.train(changed)
    assert not list(tmp_path.iterdir())


def test_what_returns_no_module_is_told(config: Config) -> None:
    model = config.model.model_copy(update={"source": "own_model:nothing"})
    with pytest.raises(ConfigError, match=r"returned a NoneType; return an nn.Module"):
        make(model, 257)
    assert callable(find_code("model.source", "own_model:nothing"))


def test_its_bytes_are_predicted_too(config: Config) -> None:
    wide = config.override({"model.dim": 2 * config.model.dim})
    assert predicted_bytes(wide, 257, None, 2) > predicted_bytes(config, 257, None, 2) > 0
