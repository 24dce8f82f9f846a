"""A user's own filter: applied, counted, part of the dataset's name, and trusted before it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared import prepare, small, write_corpus

import springtide as st
from springtide import config as configs
from springtide.cli.main import main
from springtide.dataset import open_dataset
from springtide.errors import ConfigError

FILTER = "filters_of_a_test:keep"
CODE = """
def keep(text):
    if text.startswith("drop"):
        return None
    return text.upper() if text.startswith("raise") else text
def broken(text): raise KeyError("no such word")
def wrong(text): return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the filter, below the current folder."""
    write_corpus(tmp_path / "text", 30)
    (tmp_path / "text" / "a.txt").write_text("drop this text")
    (tmp_path / "text" / "b.txt").write_text("raise this text")
    (tmp_path / "filters_of_a_test.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path / "filters_of_a_test.py"
    sys.modules.pop("filters_of_a_test", None)


def test_texts_are_dropped_and_changed_and_counted(module: Path) -> None:
    config = small(module.parent / "data", module.parent / "text", corpus__filter=FILTER)
    url = prepare(config).shards.dataset
    source = open_dataset(url)[0].source
    assert source["dropped"][FILTER] == 1
    assert source["edits"] == {f"{FILTER}: changed": 1}
    assert {"reason": FILTER, "name": "a.txt", "sample": "drop this text"} in source["examples"]
    assert prepare(config).shards.dataset == url
    module.write_text(CODE + "# other code\n")
    assert prepare(config).shards.dataset != url


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("filters_of_a_test:broken", r"raised KeyError \('no such word'\) for a text that begins"),
        ("filters_of_a_test:wrong", "returned a int for a text that begins .*; return the text, or None to drop it"),
        ("filters_of_a_test:none", "cannot be imported"),
        ("filters_of_a_test:__name__", "is not a function"),
    ],
)
def test_a_filter_that_does_not_work_is_an_error(module: Path, name: str, problem: str) -> None:
    config = small(module.parent / "data", module.parent / "text", corpus__filter=name)
    with pytest.raises(ConfigError, match=rf"corpus.filter = '{name}': {problem}"):
        prepare(config)
    with pytest.raises(ValueError, match="filter"):
        config.override({"corpus.filter": "no function"})


def test_a_file_that_names_a_filter_needs_trust(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(module.parent / "data", module.parent / "text", corpus__filter=FILTER)
    file = module.parent / "config.yaml"
    file.write_text(configs.dump(config))
    module.write_text(f"open({str(module.parent / 'marker')!r}, 'w').close()\n{CODE}")
    for command in (["data", "prepare"], ["train"], ["plan"]):
        assert main([*command, "--config", "config.yaml"]) == 2
        said = capsys.readouterr().err
        assert f"corpus.filter = {FILTER!r}" in said
        assert f"from {module}" in said
        assert "--trust-code" in said
    with pytest.raises(ConfigError, match=r"corpus\.filter"):
        st.load_config("config.yaml")
    assert not (module.parent / "marker").exists()
    assert st.load_config("config.yaml", trust_code=True) == config
    assert main(["data", "prepare", "--config", "config.yaml", "--corpus.filter", FILTER]) == 0
    assert (module.parent / "marker").exists()
    file.write_text(configs.dump(config.override({"shards.dataset": "datasets/sealed"})))
    assert st.load_config("config.yaml").corpus.filter == FILTER  # nothing is prepared, so it does not run
