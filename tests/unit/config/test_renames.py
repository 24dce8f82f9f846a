"""Retired and renamed settings: refused when they are given now, read where they are stored; retired commands are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from springtide import config as configs
from springtide.cli.main import main
from springtide.config import Config, renames
from springtide.config.fields import fields
from springtide.config.renames import Retired, as_hashed, current, lost, refused
from springtide.errors import ConfigError

ROOT = Retired("", "prepare the new text, then resume with it in stream.mixture", changes_training=True)
PAGE = Retired(8080, "open report.html")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table as later versions have it, in place of this version's."""
    monkeypatch.setattr(renames, "RETIRED_SETTINGS", {"stream.root_of_new": ROOT, "page.port": PAGE})
    names = {
        "optim.rate": "optim.top_rate",
        "optim.top_rate": "optim.peak_lr",
        "corpus.sources.*.column": "corpus.sources.*.field",
    }
    monkeypatch.setattr(renames, "RENAMED_SETTINGS", {**names, "shards.group": "stream.global_batch"})
    monkeypatch.setattr(renames, "ADDED_SETTINGS", {})
    commands = {
        "model offer": "export, then serve the export",
        "look": "use run list",
        "run list --tile": "use run list --json",
        "model export --to stone": "use hf",
    }
    monkeypatch.setattr(renames, "RETIRED_COMMANDS", commands)


def stored(**changes: Any) -> dict[str, Any]:
    """The tiny recipe as an earlier version stored it."""
    data: dict[str, Any] = yaml.safe_load(configs.dump(configs.recipes.tiny()))
    data["optim"]["rate"] = data["optim"].pop("peak_lr")
    data["shards"]["group"] = data["stream"].pop("global_batch")
    data["stream"]["root_of_new"], data["page"] = "", {"port": 8080}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        data[section][field] = value
    return data


def run_of(folder: Path, data: dict[str, Any]) -> Path:
    """The config in the folder of a run that has begun."""
    (folder / "journal").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(data))
    return folder / "config.yaml"


def test_a_stored_config_is_read_under_todays_names(tmp_path: Path) -> None:
    assert configs.build_stored(stored()) == configs.recipes.tiny()
    assert configs.parse(yaml.safe_dump(stored()).encode()) == configs.recipes.tiny()
    assert configs.load_config(run_of(tmp_path / "run", stored())) == configs.recipes.tiny()
    data = stored(optim__rate=0.25)
    data["corpus"]["sources"] = {"web": {"source": "/text", "column": "body"}}
    found = configs.build_stored(data)
    assert (found.optim.peak_lr, found.corpus.sources["web"].field) == (0.25, "body")
    assert data["optim"]["rate"] == 0.25, "the caller's data stays as it was"


def test_a_config_given_now_is_refused_with_what_to_use(tmp_path: Path) -> None:
    """All problems of the file at once, also those that have nothing to do with the table."""
    data = {
        "optim": {"rate": 1, "eps": "x"},
        "page": {"port": 9090},
        "corpus": {"sources": {"web": {"column": "body", "source": "t"}}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError) as caught:
        configs.load_config(tmp_path / "mine.yaml")
    said = str(caught.value).splitlines()
    assert said[:3] == [
        f"{tmp_path}/mine.yaml:8: optim.rate = 1: is renamed; use optim.peak_lr",
        f"{tmp_path}/mine.yaml:4: corpus.sources.web.column = 'body': is renamed; use corpus.sources.*.field",
        f"{tmp_path}/mine.yaml:10: page.port = 9090: is retired; open report.html",
    ]
    assert said[3].startswith(f"{tmp_path}/mine.yaml:7: optim.eps = 'x': ")
    assert len(said) == 4


def test_a_copy_of_a_stored_config_is_given_now(tmp_path: Path) -> None:
    """So is a file of that name in a folder that is no run's."""
    copies = [tmp_path / "copy.yaml", tmp_path / "config.yaml", tmp_path / "best.yaml"]
    for copy in copies:
        copy.write_text(yaml.safe_dump(stored(page__port=9090)))
        with pytest.raises(ConfigError, match=r"page\.port = 9090: .*report\.html"):
            configs.load_config(copy)
    (tmp_path / "sweep.json").write_text("{}")
    assert configs.load_config(tmp_path / "best.yaml") == configs.recipes.tiny()


def test_a_retired_setting_at_its_default_is_dropped(tmp_path: Path) -> None:
    """A config.yaml has every setting, so each one that is retired would end all copies of it."""
    data = stored()
    data["optim"]["peak_lr"], data["stream"]["global_batch"] = data["optim"].pop("rate"), data["shards"].pop("group")
    (tmp_path / "copy.yaml").write_text(yaml.safe_dump(data))
    assert configs.load_config(tmp_path / "copy.yaml") == configs.recipes.tiny()
    assert data["page"] == {"port": 8080}


@pytest.mark.parametrize("name", ["optim.rate", "optim.top_rate"])
def test_an_override_by_an_old_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = 0.1: .*optim\.peak_lr$"):
        Config().override({name: 0.1})
    with pytest.raises(ConfigError, match=r"^page\.port = 1: .*report\.html$"):
        Config().override({"page.port": 1})
    with pytest.raises(ConfigError, match=r"sources\.web\.column = 'body': .*renamed"):
        Config().override({"corpus.sources": {"web": {"source": "text", "column": "body"}}})


def test_what_changed_the_training_is_lost_only_off_its_default(tmp_path: Path) -> None:
    assert lost(stored()) == []
    assert lost(stored(page__port=1)) == [], "it changed no training"
    changed = stored(stream__root_of_new="/text")
    said = f"stream.root_of_new = '/text': changed the training and is retired; {ROOT.instead}"
    assert lost(changed) == [said]
    assert configs.build_stored(changed) == configs.recipes.tiny(), "whoever only reads the run opens it"
    path = run_of(tmp_path / "run", changed)
    with pytest.raises(ConfigError) as caught:
        configs.load_config(path)
    assert str(caught.value) == f"{path}: {said}"


def test_a_setting_that_was_renamed_and_then_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renames.RENAMED_SETTINGS, "stream.inbox", "stream.root_of_new")
    assert lost({"stream": {"inbox": "/text"}})[0].startswith("stream.root_of_new = '/text'")
    assert current({"stream": {"inbox": "/text"}}) == {}
    assert refused({"stream": {"inbox": ""}}) == [f"stream.inbox = '': is retired; {ROOT.instead}"]


@pytest.mark.parametrize("data", [None, 5, "text", [1], {"optim": 3}, {"optim": None}, {"page": []}, {3: 4}])
def test_what_is_no_config_is_left_to_the_config_to_refuse(data: Any) -> None:
    assert current(data) == data
    assert refused(data) == lost(data) == []
    with pytest.raises(ConfigError):
        configs.build_stored(data)


def test_settings_are_hashed_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    retired = {"page.port": PAGE, "optim.decay_of": Retired([1.0], "use optim.decay", is_free=False)}
    retired["corpus.sources.*.limit"] = Retired(None, "use corpus.max_files", is_free=False)
    monkeypatch.setattr(renames, "RETIRED_SETTINGS", retired)
    monkeypatch.setattr(renames, "ADDED_SETTINGS", {"optim.novel": "off", "corpus.sources.*.kind": None})
    now = {
        "optim": {"peak_lr": 0.5, "novel": "off"},
        "stream": {"global_batch": 4},
        "corpus": {"sources": {"web": {"field": "body", "kind": None}, "code": {"field": "text", "kind": "csv"}}},
    }
    assert as_hashed(now) == {
        "optim": {"rate": 0.5, "decay_of": [1.0]},
        "stream": {},
        "shards": {"group": 4},
        "corpus": {
            "sources": {
                "web": {"column": "body", "limit": None},
                "code": {"column": "text", "limit": None, "kind": "csv"},
            }
        },
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model offer runs/mine --port 80", "command = 'model offer': is retired; export, then serve the export"),
        ("model offer --help", "command = 'model offer': is retired; export, then serve the export"),
        ("look", "command = 'look': is retired; use run list"),
        ("run list runs --tile=index.html", "command = 'run list --tile': is retired; use run list --json"),
        ("run list --tile index.html", "command = 'run list --tile': is retired; use run list --json"),
        ("model export runs/mine --out x --to=stone", "command = 'model export --to stone': is retired; use hf"),
        ("model export --to stone runs/mine", "command = 'model export --to stone': is retired; use hf"),
        ("train --recipe tiny --optim.top-rate 1", "option = '--optim.top-rate': is renamed; use optim.peak_lr"),
        ("plan --recipe tiny --page.port=1", "option = '--page.port=1': is retired; open report.html"),
    ],
)
def test_a_retired_command_or_option_says_what_replaces_it(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr() == ("", f"springtide: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model ofer", "command = 'model ofer': is not one of evaluate"),
        ("run compare --tile-size 3", "required: other"),
        ("inspect", "required: PATH"),
        ("model export runs/mine --to paper", "invalid choice: 'paper'"),
        ("run", "required: COMMAND"),
    ],
)
def test_other_mistakes_are_told_as_before(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(words.split())
    except SystemExit as ended:  # of the parser
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_help_shows_nothing_that_is_retired(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["model", "--help"], ["run", "list", "--help"], ["train", "--help-all"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert not any(name in shown for name in ("offer", "look ", "--tile", "--page.port", "top_rate"))


def test_rows_of_this_version_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are still settings, and settings of the model, cannot be retired by a row."""
    monkeypatch.undo()
    assert not {*renames.RETIRED_SETTINGS, *renames.RENAMED_SETTINGS} & {*fields(), *renames.ADDED_SETTINGS}
    for name, was in renames.RETIRED_SETTINGS.items():
        assert was.instead, name
        assert not (was.changes_training and name.startswith("model.")), name
    for old, new in renames.RENAMED_SETTINGS.items():
        newest = renames.RENAMED_SETTINGS.get(new, new)
        assert "*" in new or newest in fields() or newest in renames.RETIRED_SETTINGS, old
    assert all("*" in name or name in fields() for name in renames.ADDED_SETTINGS)
    for command, instead in renames.RETIRED_COMMANDS.items():
        assert instead, command
        assert "\n" not in instead
