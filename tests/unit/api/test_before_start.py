"""What cannot train here is refused before anything is prepared, claimed or reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch

import springtide as st
from springtide import config as configs
from springtide.api import train
from springtide.api.prepare import prepare
from springtide.cli.commands import Status, status_of
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.ray.cluster.session import check_before_start, check_resources, starting_cluster


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return configs.recipes.gpu_125m()


def test_a_machine_without_gpus_refuses_their_recipe_and_writes_nothing(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        train.train(config)
    said = str(told.value)
    assert "elastic.gpus_per_worker = 1" in said
    assert "no GPU" in said  # and why
    assert "--elastic.gpus-per-worker 0" in said
    assert "RAY_ADDRESS" in said
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


def test_a_gpu_a_cluster_or_cpus_alone_are_enough(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    check_before_start(config.override({"elastic.gpus_per_worker": 0}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_before_start(config)
    check_before_start(config.override({"elastic.gpus_per_worker": 0.5}))
    with pytest.raises(ConfigError, match=r"elastic\.gpus_per_worker = 2\.0.* 1 GPU"):
        check_before_start(config.override({"elastic.gpus_per_worker": 2}))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_before_start(config.override({"elastic.gpus_per_worker": 2}))


@pytest.mark.parametrize("recipe", sorted(configs.recipes.RECIPES.keys() - {"tiny", "demo"}))
def test_a_recipe_for_gpus_asks_for_text_and_writes_nothing(recipe: str, tmp_path: Path) -> None:
    config = configs.recipe(recipe).override({"shards.root": str(tmp_path / "data")})
    with pytest.raises(ConfigError, match=r"corpus\.source = ''.*corpus\.tokenizer.*BPE") as told:
        prepare(config)
    assert f"a BPE of {config.corpus.vocab_size:,} ids" in str(told.value)
    assert list(tmp_path.iterdir()) == []
    for named in ({"shards.dataset": "s3://bucket/it"}, {"stream.mixture": {"it": "s3://bucket/it"}}):
        assert prepare(config.override(named)) == config.override(named)


@pytest.mark.parametrize(
    ("resources", "named"),
    [({"CPU": 8.0}, "elastic.gpus_per_worker = 1"), ({"CPU": 0.5, "GPU": 1.0}, "elastic.cpus_per_worker = 1")],
)
def test_the_setting_that_no_node_can_satisfy_is_named(
    config: Config, resources: dict[str, float], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting that no node has room for is the one named."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    config = config.override({"parallel.precision": "fp16"})
    with pytest.raises(ConfigError, match=named):
        check_resources(config)


def test_a_worker_that_no_node_has_cpus_for_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node, node])
    config = config.override({"elastic.max_workers": 256, "stream.global_batch": 256})
    assert check_resources(config.override({"elastic.cpus_per_worker": 12.0})) == []
    with pytest.raises(ConfigError, match=r"elastic\.cpus_per_worker = 97"):
        check_resources(config.override({"elastic.cpus_per_worker": 97.0}))


def test_a_cluster_of_unlike_devices_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"H100": "accelerator_type:H100", "A100": "accelerator_type:A100"}
    nodes = [{"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0, kind: 1.0}} for kind in kinds.values()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    [said] = check_resources(config)
    assert said.startswith("the cluster has A100, H100")
    assert check_resources(config.override({"elastic.gpus_per_worker": 0})) == []
    monkeypatch.setattr(ray, "nodes", lambda: nodes[:1])
    assert check_resources(config) == []


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("1ST", "is not a name of a variable"),
        ("CUDA_VISIBLE_DEVICES", "is set by springtide, Ray or torchrun"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "is set by springtide, Ray or torchrun"),
        ("AWS_SECRET_ACCESS_KEY", "looks like a secret"),
    ],
)
def test_a_variable_that_workers_must_not_be_given_is_refused(config: Config, name: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"elastic\.env\.{name} = .*{limit}") as told:
        config.override({"elastic.env": {name: "hunter2"}})
    assert ("hunter2" in str(told.value)) == ("SECRET" not in name)


@pytest.mark.parametrize("name", ["../../etc", "/etc/x", ".hidden", "a/b", "a\nb", "x" * 200])
def test_a_sweep_whose_name_leads_out_of_its_root_is_refused(tiny: Config, name: str) -> None:
    space = str(Path(__file__).parents[3] / "tune_spaces" / "lr_and_decay.py")
    with pytest.raises(ConfigError, match=r"--name = .*run\.root"):
        st.sweep(tiny, space, name=name)
    assert not Path(tiny.run.root).exists()


def test_a_population_rejects_runs_anchored_to_their_start(tmp_path: Path) -> None:
    """A population of runs that are kept near their start is refused.

    Its trials start from each other: each start would pull elsewhere."""
    table = {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": 4, "tokens_per_trial": 100_000, "rungs": 4},
    }
    changes = {"objective.anchor": "l2sp", "train.start_from": "runs/a", "run.root": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"objective\.anchor = 'l2sp'.*--scheduler pbt"):
        st.sweep(configs.recipes.tiny().override(changes), table, scheduler="pbt")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_dataset_beside_a_mixture_is_refused(tiny: Config) -> None:
    """A dataset beside a mixture that leaves one empty is refused with both fields."""
    known = tiny.shards.dataset
    with pytest.raises(ConfigError) as told:
        prepare(tiny.override({"stream.mixture": {"new": "", "old": known}}))
    said = "is set, and stream.mixture leaves new empty, which is prepared from the corpus; name the dataset of new in"
    assert str(told.value).startswith(f"shards.dataset = {known!r}: {said} stream.mixture")
    whole = tiny.override({"stream.mixture": {"new": known, "old": known}})
    assert prepare(whole) == whole
    assert prepare(tiny) == tiny


@pytest.mark.processes
def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tiny = configs.recipes.tiny().override({"run.id": "a", "run.root": str(tmp_path)})
    with pytest.raises(ConnectionError) as told, starting_cluster(tiny) as connected:
        connected()
    assert status_of(told.value) == Status.UNREACHABLE
    assert str(told.value).startswith("Ray did not start on this machine (The current node timed out")
    assert "\n" not in str(told.value)
