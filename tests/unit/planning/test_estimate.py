"""What a step needs of a worker's device, and what is said where it has less."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide import config as configs
from springtide.api.resolve import _rate_jump, fitted
from springtide.cli.main import main
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.model import make, num_parameters
from springtide.planning.estimate import (
    check_fits,
    choose_micro_batch,
    estimate_evenness,
    estimate_memory,
    gigabytes,
    least_workers,
    num_ids,
)
from springtide.planning.step_memory import predicted_bytes
from springtide.ray.cluster.session import check_precision

memory = importlib.import_module("springtide.planning.step_memory")  # the package's own ``train`` is a function
VOCABULARY = 4096
CONFIG = configs.recipes.demo().override(
    {"train.micro_batch": 8, "stream.global_batch": 16, "parallel.strategy": "ddp"}
)


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return estimate_memory(CONFIG, VOCABULARY, 0, workers=2).as_dict()


def test_what_helps_is_said_with_what_it_saves(found: dict[str, int]) -> None:
    needed = found["as configured"]
    assert needed == predicted_bytes(CONFIG, VOCABULARY, 0, 2)
    helps = ["parallel.recompute = full", "train.micro_batch = 1", "parallel.strategy = zero3 over all"]
    assert list(found) == ["as configured", *helps, "parallel.precision = bf16", "all of these", "4 workers"]
    assert all(found[words] < needed for words in helps)
    assert found["all of these"] == min(found.values())


def test_a_model_that_cannot_fit_names_the_excess(found: dict[str, int]) -> None:
    """A model that cannot fit is told by how much and what would fit."""
    needed, best = found["as configured"], found["train.micro_batch = 1"]
    check_fits(CONFIG, VOCABULARY, 0, 2, needed)
    check_fits(CONFIG, VOCABULARY, 0, 2, 0)  # nothing known of the device
    limit = best + (needed - best) // 4
    with pytest.raises(ConfigError, match=r"model = '4 layers of 256'.*fit") as told:
        check_fits(CONFIG, VOCABULARY, 0, 2, limit)
    said = str(told.value).split("what would fit: ")[1]
    assert {words for words in found if f"{words} (" in said} == {words for words in found if found[words] <= limit}
    with pytest.raises(ConfigError, match=r"nothing alone.*model"):
        check_fits(CONFIG, VOCABULARY, 0, 2, 10**6)


def test_rows_at_once_fit_the_smallest_group() -> None:
    """Rows at once are as many as fit with few workers as with many."""
    auto = CONFIG.override({"train.micro_batch": "auto", "parallel.strategy": "zero3", "elastic.max_workers": 4})
    with pytest.raises(ValueError, match=r"train\.micro_batch = 'auto'"):
        _ = auto.train.rows_at_once
    with pytest.raises(ConfigError, match=r"train\.micro_batch = 'auto'.*memory"):
        choose_micro_batch(auto, VOCABULARY, 0, 0)

    def predicted(rows: int, workers: int) -> int:
        return predicted_bytes(auto.override({"train.micro_batch": rows}), VOCABULARY, 0, workers)

    device = int(predicted(8, 1) * 1.15)
    assert choose_micro_batch(auto, VOCABULARY, 0, device).train.micro_batch == 8
    assert predicted(16, 1) > 0.9 * device > predicted(8, 1)
    assert choose_micro_batch(auto, VOCABULARY, 0, 100 * device).train.micro_batch == 16
    assert choose_micro_batch(auto, VOCABULARY, 0, 1).train.micro_batch == 1
    assert choose_micro_batch(CONFIG, VOCABULARY, 0, 1) == CONFIG


@pytest.mark.parametrize("recipe", ["tiny", "demo"])
def test_small_models_are_never_looked_at_closely(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.recipe(recipe)
    monkeypatch.setattr(memory, "predicted_bytes", lambda *_: pytest.fail("was predicted"))
    check_fits(config, VOCABULARY, 0, 2, 8 * 10**9)


MEANT_FOR = {
    "tiny": (257, 2),
    "demo": (4096, 2),
    "gpu_125m": (50_304, 1),
    "gpu_1b": (50_304, 8),
    "gemma_2b": (256_000, 64),
    "gemma2_2b": (256_000, 64),
    "gemma3_1b": (262_144, 64),
    "qwen3_4b": (151_936, 64),
    "phi4_mini": (200_064, 64),
    "mistral_7b": (32_000, 64),
    "olmo2_7b": (100_352, 64),
    "olmo3_7b": (100_352, 64),
    "llama3_8b": (128_256, 64),
    "llama3_70b": (128_256, 256),
}
"""Recipe -> ids of the vocabulary its shape is known with, workers that its docstring names."""
DEVICE_BYTES = 80 * 10**9
"""Of an A100 or H100."""


EVERY_DAY = ("tiny", "demo", "gpu_125m", "llama3_70b")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=[pytest.mark.full] * (one not in EVERY_DAY)) for one in configs.recipes.RECIPES],
)
def test_each_recipe_fits_the_devices_it_is_meant_for(recipe: str) -> None:
    vocab_size, workers = MEANT_FOR[recipe]
    assert recipe == "tiny" or configs.recipe(recipe).corpus.vocab_size == vocab_size
    check_fits(configs.recipe(recipe), vocab_size, None, workers, DEVICE_BYTES)


@pytest.mark.parametrize("changes", [{}, {"model.source": "own_model:build"}], ids=["defaults", "own model"])
def test_one_worker_without_sharding_is_foretold_too(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "programs")
    config = configs.Config().override({"model.num_layers": 1, "elastic.max_workers": 1, **changes})
    state = 16 * num_parameters(make(config.model, VOCABULARY))  # weights, gradients, two moments
    assert state < predicted_bytes(config, VOCABULARY, None, 1) < 100 * state  # activations


def test_documents_apart_are_foretold_with_what_a_gpu_gives_attention() -> None:
    there = CONFIG.override({"elastic.gpus_per_worker": 1, "model.num_layers": 2})

    def foretold(config: Config, eos_id: int | None) -> int:
        return predicted_bytes(config, VOCABULARY, eos_id, 2)

    def more_there(config: Config) -> int:
        """How much more documents apart take there than on a CPU."""
        here = config.override({"elastic.gpus_per_worker": 0})
        return foretold(config, 0) - foretold(config, None) - (foretold(here, 0) - foretold(here, None))

    square = there.model.num_layers * 8 * there.shards.sequence_length**2
    assert foretold(there, 0) - foretold(there, None) > 4 * square  # a mask as numbers, a block
    half = there.override({"parallel.precision": "bf16"})
    assert more_there(half) < -square  # FlexAttention has no mask of that size
    narrow = half.override({"model.head_dim": 8})  # too narrow for it: no other kernel takes a mask and groups of heads
    model, tokens = narrow.model, 8 * there.shards.sequence_length
    repeated = 2 * 2 * tokens * (model.num_heads - model.num_kv_heads) * model.head_width  # keys and values, bf16
    assert more_there(narrow) >= model.num_layers * repeated


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as configured"] > 0
    assert (found["evenness"]["lanes"], found["evenness"]["mean"]) == (12, 1.0)
    assert main(["plan", "--recipe", "tiny", "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "as configured" in printed
    assert printed.endswith("12 rows in 12 lanes keep workers busy for 100.0% of a step over 1 to 2 workers\n")


@pytest.mark.parametrize("option", ["--workers=0", "--workers=-1", "--vocabulary=-5"])
def test_what_is_no_number_of_workers_or_ids_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "tiny", option]) == 2
    name, value = option.removeprefix("--").split("=")
    assert f"{name} = {value}: must be at least 1" in capsys.readouterr().err


def test_an_uneven_batch_is_reported_with_an_even_one_nearby() -> None:
    """A batch that is dealt unevenly is told with one near it that is not."""
    wide = {"elastic.min_workers": 6, "elastic.max_workers": 24}
    found = estimate_evenness(CONFIG.override({**wide, "stream.global_batch": 52, "stream.lanes": 26}))
    assert (found.evenness.worst_workers, round(found.evenness.worst, 3)) == (24, 0.542)
    assert (found.better_rows, found.better_rows % 2) == (56, 0)  # whole lanes of two rows
    assert found.better_mean > found.evenness.mean
    assert found.describe().endswith(f"54.2% at 24; more even: 56 rows, {found.better_mean:.1%}")
    cells = CONFIG.override(
        {
            **wide,
            "stream.global_batch": 48,
            "stream.lanes": 48,
            "parallel.strategy": "zero3",
            "parallel.shard_workers": 6,
        }
    )
    assert (estimate_evenness(cells).evenness.mean, estimate_evenness(cells).better_rows) == (
        pytest.approx((1 + 1 + 8 / 9 + 1) / 4),
        48,
    )


def test_a_type_that_a_device_lacks_names_the_device() -> None:
    """A type that a device lacks is refused with the device named."""
    nodes = [{"CPU": 8.0, "GPU": 1.0, "accelerator_type:T4": 1.0}, {"GPU": 8.0, "accelerator_type:H100": 1.0}]
    wanted = configs.recipes.demo().override({"parallel.precision": "bf16", "elastic.gpus_per_worker": 1})
    with pytest.raises(ConfigError, match=r"parallel\.precision = 'bf16'.* T4 .*fp16"):
        check_precision(wanted, nodes)
    check_precision(wanted, nodes[1:])
    check_precision(wanted.override({"parallel.precision": "fp16"}), nodes)
    check_precision(wanted.override({"elastic.gpus_per_worker": 0}), nodes)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What each of so many workers needs with one row at once: predicted once each."""
    needs: dict[int, int] = {}

    def cached(config: Config, vocab_size: int, eos_id: int | None, workers: int) -> int:
        if workers not in needs:
            needs[workers] = predicted_bytes(config, vocab_size, eos_id, workers)
        return needs[workers]

    monkeypatch.setattr(memory, "predicted_bytes", cached)
    return needs


SHALLOW = CONFIG.override(
    {"model.num_layers": 1, "parallel.strategy": "zero3", "elastic.max_workers": 4, "train.micro_batch": 1}
)


def test_fewest_workers_fit_a_step_with_one_row(predicted: dict[int, int]) -> None:
    """Fewest workers are those whose step fits with one row at once."""
    needs = [memory.predicted_bytes(SHALLOW, VOCABULARY, 0, workers) for workers in (1, 2, 3, 4)]
    assert needs == sorted(needs, reverse=True)
    assert [least_workers(SHALLOW, VOCABULARY, 0, has) for has in needs] == [1, 2, 3, 4]
    assert least_workers(SHALLOW, VOCABULARY, 0, needs[2] - 1) == 4
    assert least_workers(SHALLOW, VOCABULARY, 0, needs[3] - 1) == 4  # nothing fits: that is said elsewhere
    assert least_workers(SHALLOW, VOCABULARY, 0, 0) == 1  # not known
    auto = SHALLOW.override({"train.micro_batch": "auto"})
    assert least_workers(auto, VOCABULARY, 0, needs[2]) == 3
    pairs = SHALLOW.override({"parallel.shard_workers": 2, "elastic.min_workers": 2})
    assert (
        least_workers(pairs, VOCABULARY, 0, needs[2]) == 4
    )  # three are no multiple of what a copy of the model is laid over


def test_a_run_on_ray_begins_with_workers_that_fit(monkeypatch: pytest.MonkeyPatch, predicted: dict[int, int]) -> None:
    """A run on Ray begins with no fewer workers than fit and says so."""
    has = memory.predicted_bytes(SHALLOW, VOCABULARY, 0, 2)
    data = SimpleNamespace(vocab_size=VOCABULARY, eos_id=0)
    monkeypatch.setattr("springtide.ray.cluster.session.device_size", lambda config: (has, 0))
    config, said = fitted(SHALLOW, data)
    assert config.elastic.min_workers == 2
    assert said == [
        f"elastic.min_workers = 2: with fewer workers a step does not fit the {gigabytes(has)} that each has"
    ]


def test_ids_are_those_of_the_weights_that_a_run_starts_from() -> None:
    imported = CONFIG.override({"model.vocab_size": 1000})
    assert (num_ids(CONFIG), num_ids(imported), num_ids(imported, 300)) == (CONFIG.corpus.vocab_size, 1000, 300)


def test_a_longer_run_tells_how_its_learning_rate_jumps() -> None:
    before = configs.recipes.tiny().override({"optim.schedule": "cosine"})
    longer = before.override({"train.total": 2 * int(before.train.total)})
    end = f"runs/a/checkpoints/step-{before.num_steps:010d}"
    [told] = _rate_jump(before, longer, end)
    assert f"after step {before.num_steps} " in told
    assert _rate_jump(before, longer, "runs/a/checkpoints/step-0000000001") == []
    assert _rate_jump(before, before.override({"train.eval_every": 7}), end) == []
