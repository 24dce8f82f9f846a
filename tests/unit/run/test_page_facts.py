"""What stands at the top of a run's page: where it came from, and the sweep that it belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.api.provenance import origin_of
from springtide.config import Config
from springtide.run.folder import Run
from springtide.run.origin import ORIGIN, Origin, read_origin, write_origin
from springtide.run.page_facts import facts_of
from springtide.run.report.html import Link
from springtide.storage import Folder
from springtide.tune.folder import SweepFolder, TrialEnd

FOUND = Origin("springtide train --recipe tiny", "0123456789abcdef", "main", "https://git.host/mine.git", True)


@pytest.fixture
def run(tiny: Config, tmp_path: Path) -> Run:
    made = Run(Folder(tmp_path / "tuned" / "trials" / "trial-0007"))
    made.write_config(tiny)
    return made


def test_the_page_has_command_and_commit_of_the_newest_start(run: Run) -> None:
    assert not {"command", "commit"} & dict(facts_of(run).about).keys(), "a run of an earlier version"
    write_origin(run.folder, FOUND)
    about = dict(facts_of(run).about)
    assert about["command"] == "springtide train --recipe tiny"
    assert about["commit"] == "0123456789ab, branch main of https://git.host/mine.git, with uncommitted changes"
    assert read_origin(run.folder) == FOUND


@pytest.mark.processes
def test_a_start_knows_them_and_shows_no_secret(tmp_path: Path) -> None:
    found = origin_of(["springtide", "train", "--run.root", "s3://id:hunter2@bucket/runs"], str(tmp_path))
    assert found == Origin("springtide train --run.root 's3://id:***@bucket/runs'")
    assert found.source == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"command": 3}', '{"command": "' + "x" * 30_000 + '"}'])
def test_a_damaged_file_costs_its_lines_alone(run: Run, text: str, caplog: pytest.LogCaptureFixture) -> None:
    run.folder.write(ORIGIN, text)
    assert "config" in dict(facts_of(run).about)
    assert ORIGIN in caplog.text


def test_a_trial_leads_to_its_sweep_and_says_who_ended_it(run: Run, tmp_path: Path) -> None:
    assert "trial of" not in dict(facts_of(run).about), "a folder that is called trials"
    sweep = SweepFolder(Folder(tmp_path / "tuned"))
    sweep.write_plan({"space": []})
    assert dict(facts_of(run).about)["trial of"] == Link("tuned", "../../sweep.html")
    sweep.write_end(7, TrialEnd("stopped", "by asha at step 40"))
    assert dict(facts_of(run).about)["ended"] == "stopped: by asha at step 40"
    again = Run(Folder(tmp_path / "tuned" / "trials" / "trial-0007-2"))
    again.write_config(run.config)
    assert dict(facts_of(again).about)["ended"] == "stopped: by asha at step 40", "a later generation"
    run.write_report()
    assert '<a href="./../../sweep.html">tuned</a>' in run.folder.read("report.html").decode()
