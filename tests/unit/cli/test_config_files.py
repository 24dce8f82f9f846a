"""A config file on the command line: where it stands, which recipe it starts from, and the paths that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.cli.main import main, parser
from springtide.cli.options import config_of
from springtide.config import Config
from springtide.config.files import recipe
from springtide.errors import ConfigError
from springtide.run.folder import Run
from springtide.store import Folder


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*words: str) -> Config:
    options, unknown = parser(False).parse_known_args(words)
    assert unknown == []
    return config_of(options)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as told:
        config(*words)
    return str(told.value)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "mine.yaml", "--run.root", "here"),
        ("train", "--run.root", "here", "mine.yaml"),
        ("train", "--trust-code", "mine.yaml", "--run.root", "here"),
        ("train", "mine.yaml", "--config", "mine.yaml", "--run.root", "here", "--resume"),
        ("data", "prepare", "mine.yaml", "--run.root", "here"),
        ("plan", "--cluster", "nodes.yaml", "mine.yaml", "--run.root", "here"),
        ("estimate", "mine.yaml", "--run.root=here"),
        ("sweep", "--space", "space.py", "mine.yaml", "--run.root", "here"),
    ],
    ids=" ".join,
)
def test_a_config_file_needs_no_option(words: tuple[str, ...]) -> None:
    Path("mine.yaml").write_text("run: {id: mine}")
    assert (config(*words).run.id, config(*words).run.root) == ("mine", "here")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.yaml", "--config", "other.yaml"), "--config = 'other.yaml': and mine.yaml are two config files; name one"),
        (("mine.yaml", "--recipe", "tiny"), "--recipe = 'tiny': and mine.yaml are two configs; name one of them, or write"),
        (("--config", "mine.yaml", "--recipe", "tiny"), "--recipe = 'tiny': and mine.yaml are two configs"),
        (("tiny",), "config = 'tiny': is a recipe, not a file; write --recipe tiny"),
        ((), "config = '': is missing; name a file, or --recipe and one of tiny, demo"),
        (("absent.yaml",), "config = 'absent.yaml': cannot be read"),
    ],
)  # fmt: skip
def test_one_config_is_named(words: tuple[str, ...], said: str) -> None:
    Path("mine.yaml").write_text("run: {id: mine}")
    assert refused("train", *words).startswith(said)


def test_a_file_after_resume_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--resume", "mine.yaml"])
    assert "'mine.yaml' is not auto; a config file goes before --resume" in capsys.readouterr().err


def test_a_file_names_its_recipe() -> None:
    Path("mine.yaml").write_text("recipe: tiny\nrun: {id: mine}\ntrain:\nmodel:\n  num_layers: 3\n")
    assert config("train", "mine.yaml") == recipe("tiny").override({"run.id": "mine", "model.num_layers": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {id: a}\nrecipe: tinny", "mine.yaml:2: recipe = 'tinny': known are tiny, demo"),
        ("recipe: sft", "mine.yaml:1: recipe = 'sft': goes on from a model; name its run"),
        ("recipe: sft\ntrain: {start_from: runs/none}", "train.start_from = 'runs/none': has no config.yaml; name the folder"),
        ("recipe: 010", "mine.yaml:1: recipe = '8': known are"),
        (
            "model: {num_heads: 4}",
            "mine.yaml:1: model.num_kv_heads = 3: must divide model.num_heads = 4; choose a divisor "
            "(model.num_kv_heads: not in this file, from the defaults)",
        ),
        (
            "recipe: tiny\nmodel:\n  num_kv_heads: 3",
            "mine.yaml:3: model.num_kv_heads = 3: must divide model.num_heads = 4; choose a divisor "
            "(model.num_heads: not in this file, from recipe 'tiny')",
        ),
        ("recipe: tiny\ntrain: 5", "mine.yaml:2: train = 5: is not a table of names and values"),
    ],
)  # fmt: skip
def test_an_error_says_which_recipe_a_value_is_from(text: str, said: str) -> None:
    Path("mine.yaml").write_text(text)
    assert said in refused("train", "mine.yaml")


def test_a_file_may_start_from_a_model(tiny: Config) -> None:
    """Its recipe takes the model from the run that the file or the command line names."""
    Run(Folder("runs/base")).write_config(tiny.override({"model.dim": 32, "train.micro_batch": 3}))
    Path("mine.yaml").write_text("recipe: lora\ntrain: {start_from: runs/base, total: 99k}\n")
    found = config("train", "mine.yaml", "--optim.peak-lr", "1e-5")
    assert (found.model.dim, found.model.adapter, found.train.micro_batch) == (32, "lora", 3)
    assert (found.train.total, found.optim.peak_lr, found.train.start_with) == (99_000, 1e-5, "weights")
    Path("mine.yaml").write_text("recipe: lora\n")
    assert config("train", "mine.yaml", "--train.start-from", "runs/base").model.dim == 32
