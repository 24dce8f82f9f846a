"""``springtide report`` and the page that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.cli.main import main
from springtide.config import Config
from springtide.run.folder import Run
from springtide.storage import Folder


def test_it_writes_a_page_that_is_not_there(tiny: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Under torchrun no driver writes it; the command named a file that did not exist."""
    folder = Path(tiny.run.root) / "alone"
    Run(Folder(str(folder))).write_config(tiny.override({"run.id": "alone"}))
    assert main(["report", str(folder)]) == 0
    assert f"{folder}/report.html" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert "alone" in page
    (folder / "report.html").write_text("of the driver")
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == "of the driver"
