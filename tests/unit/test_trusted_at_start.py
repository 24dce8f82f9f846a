"""Code that its user trusted when the run started needs no --trust-code to resume: by digest, by this user, in this run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import springtide as st
from springtide import config as configs
from springtide.checkpoint import leases
from springtide.cli.main import main
from springtide.config import Config, check_trusted
from springtide.config.code import code_digest
from springtide.errors import ConfigError
from springtide.storage import Folder
from springtide.training.group_lease import GroupLease

SOURCE = "trusted_model.net:build"
SOURCES = {"model.source": SOURCE}
CODE = "open('marker', 'w').close()\nraise ImportError('it ran')\n"


@pytest.fixture
def run(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A run of the user's own model, started once by its user and over now; ``marker`` beside the code says it was imported."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for folder in ("home", "home of another", "trusted_model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trusted_model" / "__init__.py").write_text("")
    (tmp_path / "trusted_model" / "layers.py").write_text("WIDTH = 8\n")
    (tmp_path / "trusted_model" / "net.py").write_text(CODE)
    folder = Folder(str(tmp_path / "runs" / "mine"))
    config = tiny.override({"model.source": SOURCE, "run.id": "mine", "run.root": str(tmp_path / "runs")})
    folder.write("config.yaml", configs.dump(config))
    driver = leases.claim(folder, "driver", trains=False, sources=SOURCES)
    leases.end(folder, leases.claim(folder, "driver", again=True).term)
    leases.end(folder, driver.term)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "trusted_model"]:
        del sys.modules[name]


def _resume(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What an unattended resume says: it ends where the code runs, or before."""
    assert main(["train", "--config", "runs/mine/config.yaml", "--resume", "--dry-run", *more]) == 2
    return capsys.readouterr().err


def test_a_resume_needs_no_flag_and_so_do_commands_on_the_run(run: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it ran" in _resume(capsys)
    assert Path("marker").exists()
    with pytest.raises(ConfigError, match="no checkpoint"):
        st.open_run("runs/mine").evaluate()


def test_changed_code_is_refused_with_both_digests(run: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    before = code_digest(SOURCES)
    Path("trusted_model/layers.py").write_text("WIDTH = 9\n")
    said = _resume(capsys)
    assert f"has changed since you trusted it: its digest was {before} and is {code_digest(SOURCES)}" in said
    assert "--trust-code" in said
    with pytest.raises(ConfigError, match=before):
        st.open_run("runs/mine").evaluate()
    assert not Path("marker").exists()
    assert "it ran" in _resume(capsys, "--trust-code")


def test_another_source_is_not_trusted_by_the_claim(
    run: Folder, tiny: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.py").write_text(CODE)
    text = run.read("config.yaml").decode()
    run.write("config.yaml", text.replace(SOURCE, "other:build"))
    assert "--trust-code" in _resume(capsys)
    run.write("config.yaml", text.replace(SOURCE, "trusted_model.net:drop_tables"))
    assert "--trust-code" in _resume(capsys)
    assert not Path("marker").exists()


def test_a_claim_that_somebody_else_wrote_or_copied_is_worth_nothing(
    run: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # a run that was sent: its digest is right, its seal is of another user's key
    last = leases.newest(run)
    assert last is not None
    shutil.copytree("runs/mine", "runs/sent")
    sent = Folder(str(tmp_path / "runs" / "sent"))
    assert leases.trusted_code(run, SOURCES) == code_digest(SOURCES) == leases.newest(sent).code  # type: ignore[union-attr]
    assert leases.trusted_code(sent, SOURCES) == "", "a copy of my own run: the seal names the folder"
    for seal in ("", "0" * 64, 5, None):
        forged = dataclasses.asdict(last) | {"seal": seal}
        run.write(f"leases/{last.term:04d}.json", json.dumps(forged))
        assert "--trust-code" in _resume(capsys)
    monkeypatch.setenv("HOME", str(tmp_path / "home of another"))
    run.write(f"leases/{last.term:04d}.json", json.dumps(dataclasses.asdict(last)))
    assert "--trust-code" in _resume(capsys)
    assert not Path("marker").exists()


def test_a_key_that_others_can_read_is_not_used(run: Folder, tmp_path: Path) -> None:
    [key] = (path for path in (tmp_path / "home").rglob("*") if path.is_file())
    assert key.stat().st_mode & 0o777 == 0o600
    assert leases.trusted_code(run, SOURCES)
    key.chmod(0o644)
    assert leases.trusted_code(run, SOURCES) == ""
    key.chmod(0o600)
    if os.getuid() == 0:
        os.chown(key, 65534, 65534)
        assert leases.trusted_code(run, SOURCES) == ""


def test_without_a_home_to_write_to_the_flag_stays_needed(
    run: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    leases.claim(run, "next", trains=False, sources=SOURCES)
    assert leases.trusted_code(run, SOURCES) == ""


def test_worker_groups_of_torchrun_put_it_into_their_claim_too(run: Folder) -> None:
    group = GroupLease(run, "", "", sources=SOURCES)
    group.claim()
    assert leases.trusted_code(run, SOURCES) == code_digest(SOURCES)
    Path("trusted_model/layers.py").write_text("WIDTH = 9\n")
    group.claim()
    assert leases.trusted_code(run, SOURCES) != code_digest(SOURCES), "what was trusted is what its first claim says"


def test_the_digest_is_of_the_package_or_of_the_one_file(run: Folder) -> None:
    before = code_digest(SOURCES)
    assert len(before) == 32
    assert code_digest({"model.source": "trusted_model.net:other"}) == before
    Path("trusted_model/data").mkdir()
    Path("trusted_model/data/weights.bin").write_bytes(b"no code")
    assert code_digest(SOURCES) == before
    Path("trusted_model/data/more.py").write_text("")
    assert code_digest(SOURCES) != before
    Path("plain").mkdir()  # no __init__.py: not a package that the user has drawn a line around
    Path("plain/one.py").write_text("1")
    one = code_digest({"model.source": "plain.one:build"})
    Path("plain/two.py").write_text("2")
    assert code_digest({"model.source": "plain.one:build"}) == one != ""
    assert code_digest({"model.source": "nowhere.at.all:build"}) == ""
    with pytest.raises(ConfigError):
        check_trusted({"model.source": "nowhere.at.all:build"}, "a file", False, "")


def test_a_seal_is_of_the_fields_that_name_the_code(run: Folder) -> None:
    both = {"model.source": SOURCE, "optim.source": SOURCE}
    assert code_digest(both) not in ("", code_digest(SOURCES))
    assert code_digest({**SOURCES, "optim.source": "nowhere.at.all:build"}) == ""
    leases.claim(run, "next", trains=False, sources=both)
    assert leases.trusted_code(run, both) == code_digest(both)
    assert leases.trusted_code(run, SOURCES) == "", "claimed with an optimizer, too"
    assert leases.trusted_code(run, {"model.source": SOURCE, "objective.source": SOURCE}) == ""
