"""What a stranger's folder or server says cannot command the terminal."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from springtide.checkpoint import retention
from springtide.cli.main import main
from springtide.cli.output import say
from springtide.config import Config
from springtide.errors import ConfigError, explain, printable
from springtide.shards import load_manifest, write_manifest
from springtide.storage import Folder

HOSTILE = "a\x1b]0;pwned\x07\u202eb\u200bc\udcff"
HARMLESS = "a\ufffd]0;pwned\ufffd\ufffdb\ufffdc\ufffd"


def test_commands_errors_and_logs_are_printable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    say(HOSTILE)
    say(HOSTILE, error=True)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{HARMLESS}\n",) * 2
    assert explain("a", 1, HOSTILE, HOSTILE) == f"a = 1: {HARMLESS}; {HARMLESS}"
    assert main(["run", "list", str(tmp_path)]) == 0  # it sets the form of log lines
    assert logging.lastResort is not None
    line = logging.lastResort.format(logging.LogRecord("springtide", 30, "", 1, "server: %s", (HOSTILE,), None))
    assert line == f"server: {HARMLESS}"


@pytest.mark.parametrize("code", [0xAD, 0x115F, 0x180E, 0x2060, 0x2064, 0x206A, 0x3164, 0xFFA0, 0xFFFB, 0x1D173])
def test_what_is_not_seen_is_replaced(code: int) -> None:
    """``a`` and ``a`` with a word joiner look the same, and are two names."""
    assert printable(f"a{chr(code)}b") == "a\ufffdb"


def test_numbers_that_python_does_not_spell_are_described() -> None:
    assert explain("a", [2**20_000], "b", "c") == "a = [a number of 20,001 bits]: b; c"
    assert explain("a", -12, "b", "c") == "a = -12: b; c"


def test_joiners_of_emoji_and_scripts_stay() -> None:
    for text in (
        "\u2764\ufe0f",
        "\u845b\U000e0100",
        "\U0001f469\u200d\U0001f680",
        "\u0915\u094d\u200d\u0937",
        "tab\tline\n",
    ):
        assert printable(text) == text


def _with_source(dataset: str, to: Path, **changes: object) -> str:
    """Copy a dataset; its manifest says something else of the text that was read."""
    copy = Folder(shutil.copytree(dataset, to))
    manifest = load_manifest(copy)
    write_manifest(copy, manifest.model_copy(update={"source": manifest.source | changes}))
    return copy.url


def test_names_of_a_dataset_make_no_lines(tiny: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A line break in the name of a file would begin a line that looks like one of ours."""
    broken = [{"name": "a\ndataset verified", "reason": "r\r\nok", "sample": "s"}]
    url = _with_source(tiny.shards.dataset, tmp_path / "data", source="text\n  card x", broken=broken)
    assert main(["inspect", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  broken: a dataset verified: r ok: 's'" in lines
    assert not {"dataset verified: r", "ok: 's'", "  card x: "} & {*lines}


@pytest.mark.parametrize("changes", [{"dropped": [1]}, {"documents_by_tokens": [[1]]}, {"broken": [{}]}])
def test_a_source_of_another_form_names_the_manifest(
    changes: dict[str, object], tiny: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = _with_source(tiny.shards.dataset, tmp_path / "data", **changes)
    assert main(["inspect", url]) == 2
    assert "manifest.json: " in capsys.readouterr().err


def test_no_note_is_written_through_a_link_of_a_stranger(tmp_path: Path) -> None:
    run, target = tmp_path / "stranger", tmp_path / "mine"
    (run / "checkpoints").mkdir(parents=True)
    target.mkdir()
    (run / "checkpoints" / "readers").symlink_to(target)
    with pytest.raises(ConfigError, match="link"):
        retention.hold(Folder(str(run)), "step-0000000001", "me")
    with pytest.raises(ConfigError, match="link"), retention.note_reader(Folder(str(run)), "step-0000000001"):
        pass
    assert not list(target.iterdir())
