"""Code that a config names runs only where the caller has named it himself, or has said that it may."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import springtide as st
from springtide import config as configs
from springtide.api.train import sample
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.code import file_of, find_code
from springtide.errors import ConfigError
from springtide.training.__main__ import main as torchrun

SOURCE = "runs.evil-1.helper:build"


@pytest.fixture
def marker(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that importing code of ``runs/evil-1`` makes: a run's folder that somebody sent, below the current folder."""
    run, marker = tmp_path / "runs" / "evil-1", tmp_path / "marker"
    (run / "checkpoints" / "step-0000000001").mkdir(parents=True)
    (run / "checkpoints" / "step-0000000001" / "COMMITTED").write_text("{}")
    changes = {"model.source": SOURCE, "run.id": "evil-1", "run.root": str(tmp_path / "runs")}
    (run / "config.yaml").write_text(configs.dump(tiny.override(changes)))
    (run / "helper.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef build(*_): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield marker
    for name in [name for name in sys.modules if name.split(".")[0] == "runs"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "evaluate", "runs/evil-1"],
        ["model", "generate", "runs/evil-1", "--prompt", "x"],
        ["plan", "--config", "runs/evil-1/config.yaml"],
        ["train", "--config", "runs/evil-1/config.yaml", "--run.id", "mine"],
        ["train", "--config", "runs/evil-1/config.yaml", "--resume"],
        ["sweep", "--config", "runs/evil-1/config.yaml", "--space", "none.py"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_code_of_a_run_or_a_file_is_refused_by_name(
    marker: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"model.source = {SOURCE!r}" in said
    assert "runs/evil-1/config.yaml names: module runs.evil-1.helper" in said
    assert f"from {marker.parent}/runs/evil-1/helper.py" in said
    assert "--trust-code" in said
    assert not marker.exists()
    assert "runs" not in sys.modules


def test_in_python_and_under_torchrun_it_is_refused_too(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = st.open_run("runs/evil-1")
    monkeypatch.setattr(sys, "argv", ["train", "--config", "runs/evil-1/config.yaml"])
    for act in (run.evaluate, lambda: sample(run), lambda: st.load_config("runs/evil-1/config.yaml"), torchrun):
        with pytest.raises(ConfigError, match="trust_code=True"):
            act()
    assert not marker.exists()
    assert st.load_config("runs/evil-1/config.yaml", trust_code=True) == run.config


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "evaluate", "runs/evil-1", "--trust-code"],
        ["plan", "--config", "runs/evil-1/config.yaml", "--trust-code"],
        ["plan", "--recipe", "tiny", "--model.source", SOURCE],
        ["plan", "--config", "runs/evil-1/config.yaml", "--model.source", SOURCE],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_code_that_is_trusted_or_typed_runs(
    marker: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "returned a NoneType" in capsys.readouterr().err, "the model that it should have made is missed"
    assert marker.exists()


def test_what_looks_at_a_run_alone_needs_no_trust(marker: Path) -> None:
    for command in (["inspect"], ["verify"], ["report"]):
        main([*command, "runs/evil-1"])
    assert main(["data", "prepare", "--config", "runs/evil-1/config.yaml", "--json"]) == 0
    assert not marker.exists()


def test_the_current_folder_comes_after_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "colorsys.py").write_text("raise AssertionError('a file that lies about')")
    (tmp_path / "mine_alone.py").write_text("def build(*_): pass")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert file_of("mine_alone") == str(tmp_path / "mine_alone.py")
    assert file_of("colorsys") != str(tmp_path / "colorsys.py")
    assert file_of("nowhere.at.all") == "a file that does not exist now"
    assert find_code("objective.source", "colorsys:rgb_to_hsv")(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
    assert find_code("model.source", "mine_alone:build")() is None


@pytest.mark.parametrize("field", ["optim.source", "objective.source"])
def test_an_optimizer_and_an_objective_are_refused_likewise(
    tiny: Config, marker: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("runs/evil-1/config.yaml")
    file.write_text(configs.dump(tiny.override({field: SOURCE, "run.id": "evil-1"})))
    for arguments in (["plan"], ["train", "--run.id", "mine", "--model.source", "mine:build"]):
        assert main([arguments[0], "--config", str(file), *arguments[1:]]) == 2
        assert f"{field} = {SOURCE!r}: is code that {file} names" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=field):
        st.load_config(file)
    assert not marker.exists()
    assert main(["plan", "--config", str(file), f"--{field}", "none:at_all"]) == 2, "named by the user himself"
    assert "--trust-code" not in capsys.readouterr().err
