"""A config file on the command line: where it stands, which recipe it starts from, and the paths that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.cli.main import main, parser
from springtide.cli.options import config_of
from springtide.config import Config
from springtide.errors import ConfigError


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
