"""Two drivers of one run start at the same moment: the run is free when both look, and one of them claims it."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.api import train
from springtide.api.resolve import ResolvedRun
from springtide.checkpoint import leases
from springtide.config import Config
from springtide.errors import RunExists
from springtide.run.folder import Run
from springtide.storage import Folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` and its bytes."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_driver_that_claims_too_late_has_written_nothing(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "one"
    late = ResolvedRun(Run(Folder(folder)), tiny, starts_from="", remarks=())
    leases.claim(late.run.folder, "first", trains=False)
    monkeypatch.setattr(leases, "_is_alive", lambda run, lease: True)
    before = contents(folder)
    with pytest.raises(RunExists, match="is held by lease 1, begun"):
        train._claim_and_train(late, "off", None, None, False)
    assert contents(folder) == before
