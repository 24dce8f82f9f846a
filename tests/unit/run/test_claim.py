"""A run's name is taken once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.config import Config
from springtide.errors import ConfigError, RunExists
from springtide.run.find import find_run
from springtide.run.folder import Run, open_run


def named(config: Config, name: str = "taken", **changes: object) -> Config:
    return config.override({"run.id": name, **{key.replace("__", "."): value for key, value in changes.items()}})


def claim(config: Config, resume: bool, accept_changes: bool) -> tuple[Config, Run]:
    """Claim, and make it a run."""
    config, run = find_run(config, resume, accept_changes)
    run.folder.write(configs.RUN_CONFIG, configs.dump(config))
    return config, run


def test_a_new_run_gets_a_name_and_its_config(tiny: Config) -> None:
    config, run = claim(tiny, resume=False, accept_changes=False)
    assert config.run.id == run.id
    assert run.id.startswith(time.strftime("%Y"))
    assert run.config == config
    assert open_run(run.folder.url) == run


def test_a_name_that_is_taken_is_refused_and_the_difference_shown(tiny: Config) -> None:
    claim(named(tiny), resume=False, accept_changes=False)
    with pytest.raises(RunExists, match=r"config.*--resume"):
        claim(named(tiny), resume=False, accept_changes=False)
    with pytest.raises(RunExists, match=r"optim.peak_lr: 0.003 -> 0.001"):
        claim(named(tiny, optim__peak_lr=0.001), resume=False, accept_changes=False)


def test_resuming_may_change_where_it_runs_but_not_what_it_learns(tiny: Config) -> None:
    first, run = claim(named(tiny), resume=False, accept_changes=False)
    moved, same = claim(named(first, elastic__max_workers=5), resume=True, accept_changes=False)
    assert same == run
    assert run.config == moved
    with pytest.raises(RunExists, match=r"\n  optim\.peak_lr: 0\.003 -> 0\.001"):
        claim(named(first, optim__peak_lr=0.001), resume=True, accept_changes=False)
    assert run.config == moved  # a refusal writes nothing
    accepted, _ = claim(named(first, optim__peak_lr=0.001), resume=True, accept_changes=True)
    assert run.config == accepted


def test_resume_without_a_name_takes_the_newest_of_this_config(tiny: Config) -> None:
    for name in ("20260101-a", "20260102-b"):
        claim(named(tiny, name), resume=False, accept_changes=False)
    claim(named(tiny, "20260103-other", optim__peak_lr=0.001), resume=False, accept_changes=False)
    config, _ = claim(tiny, resume=True, accept_changes=False)
    assert config.run.id == "20260102-b"
    with pytest.raises(ConfigError, match=r"run\.id = '': .*config"):
        claim(tiny.override({"optim.peak_lr": 0.5}), resume=True, accept_changes=False)


def test_there_must_be_something_to_resume(tiny: Config) -> None:
    with pytest.raises(ConfigError, match=r"run\.id = 'absent': .*resume"):
        claim(named(tiny, "absent"), resume=True, accept_changes=False)
    with pytest.raises(ConfigError, match="run's folder"):
        open_run(tiny.run.root)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tiny: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.root = .*written"):
        claim(tiny.override({"run.root": str(tmp_path / "file")}), resume=False, accept_changes=False)


def test_a_run_that_only_began_can_be_looked_at(tiny: Config) -> None:
    _, run = claim(named(tiny), resume=False, accept_changes=False)
    assert (run.steps, run.checkpoints, run.evaluations, run.sample) == ([], [], [], "")
    assert run.metrics.empty
    assert not run.verify().ok
    run.write_report()
    assert "Nothing happened yet" in Path(run.report).read_text()
    assert isinstance(run, Run)


def test_a_name_is_not_taken_by_a_run_whose_data_failed(tiny: Config, tmp_path: Path) -> None:
    import springtide as st
    from springtide.errors import CorpusError

    missing = named(tiny, corpus__source=str(tmp_path / "absent"), shards__dataset="")
    for _ in range(2):
        with pytest.raises(CorpusError, match="exist"):
            st.train(missing)
