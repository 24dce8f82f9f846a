"""Whoever is refused, or fenced off, has written nothing; and a run that is over is left as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import go_back_when_fenced, train_as_torchrun_does
from saving import apart

import springtide as st
from springtide.checkpoint import leases
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.errors import CheckpointError, ConfigError, RunExists
from springtide.storage import Folder

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 12


def contents(folder: str) -> dict[str, bytes]:
    """Every file below ``folder`` and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def trained(tiny: Config, ranks: Ranks) -> Config:
    """The config of a run that has finished, with checkpoints of steps 5, 10 and 12."""
    short = {"train.total": 12 * 64 * STEPS, "optim.warmup": 0, "train.eval_tokens": 0, "checkpoint.every_steps": 5}
    config = tiny.override({**short, "run.id": "trained", "train.sample_tokens": 0})
    ranks(1, train_as_torchrun_does, config)
    return config


_DRIVER = (
    "import sys; from springtide.checkpoint import leases; from springtide.storage import Folder; "
    "run = Folder(sys.argv[1]); driver = leases.claim(run, 'driver', trains=False); "
    "leases.socket.gethostname = lambda: 'elsewhere'; leases.claim(run, 'driver', again=True); "
    "print('claimed', flush=True); sys.stdin.read()"
)
"""A driver of this machine, whose group of workers has claimed the run from another."""


@pytest.fixture
def held(trained: Config) -> Iterator[Config]:
    """The same while another driver of this machine holds it."""
    command = [sys.executable, "-c", _DRIVER, f"{trained.run.root}/{trained.run.id}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "claimed\n"
        yield trained
        driver.communicate("")


def test_a_driver_that_is_refused_has_written_nothing(held: Config) -> None:
    folder = f"{held.run.root}/{held.run.id}"
    before = contents(folder)
    skipping = held.override({"stream.skip": [3], "train.total": 12 * 64 * 20})
    for options in ({"accept_changes": True}, {"accept_changes": True, "from_scratch": True}):
        with pytest.raises(RunExists, match=r"is held by lease \d+, begun"):
            st.train(skipping, resume=True, **options)  # type: ignore[arg-type]
        assert contents(folder) == before


def test_a_group_of_torchrun_that_is_refused_has_written_nothing(held: Config, ranks: Ranks) -> None:
    folder = f"{held.run.root}/{held.run.id}"
    before = contents(folder)
    longer = held.override({"train.total": 12 * 64 * 20})
    for from_scratch in (False, True):
        with pytest.raises(AssertionError, match=r"RunExists: .* is held by lease \d+, begun"):
            ranks(1, train_as_torchrun_does, longer, from_scratch)
        assert contents(folder) == before


def test_a_group_that_was_fenced_off_writes_nothing_when_it_goes_back(tiny: Config, ranks: Ranks) -> None:
    changes = {"run.id": "fenced", "optim.on_spike": "rollback", "checkpoint.every_steps": 2, "train.eval_tokens": 0}
    changes |= {"checkpoint.stage": "/dev/shm"}
    [(said, before, after)] = ranks(1, go_back_when_fenced, tiny.override(changes))
    assert "is held by lease 2" in said
    assert before
    assert before == after


def test_a_run_that_has_finished_is_left_as_it_is(trained: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"{trained.run.root}/{trained.run.id}"
    before = contents(folder)
    shown = trained.override({"track.progress": True})
    resumes: tuple[Any, ...] = (True, "auto")
    for resume in resumes:
        run = st.train(shown, resume=resume)
        assert (run.id, run.finished) == ("trained", True)
        assert f"finished at step {STEPS}: nothing to do" in capsys.readouterr().out
    assert contents(folder) == before


def test_a_step_0_that_nobody_asked_for_is_refused_before_anything_starts(trained: Config, ranks: Ranks) -> None:
    run = Folder(trained.run.root) / trained.run.id
    older = trained.override({"stream.skip": [1], "train.total": 12 * 64 * 20})
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is of this order.*--from-scratch"):
        st.train(older, resume=True, accept_changes=True)
    assert len(committed(run)) == 3
    for name in committed(run):
        (run / "checkpoints").write(f"{name}/QUARANTINED", '{"reason": "by hand"}')
    longer = trained.override({"train.total": 12 * 64 * 20})
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"none of them counts now.*--from-scratch"):
            st.train(longer, resume=resume, accept_changes=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="restarts an existing run"):
        st.train(longer, from_scratch=True)
    with pytest.raises(AssertionError, match=r"none of them counts now.*--from-scratch"):
        ranks(1, train_as_torchrun_does, longer)
    ranks(1, train_as_torchrun_does, longer, True)
    assert committed(run)[-1] == "step-0000000020"
    assert st.open_run(run.url).verify().ok


def test_a_node_without_the_run_s_storage_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is the storage of run.root mounted here\?"):
        leases.claim(Folder(tmp_path), "driver", again=True)
    assert not os.listdir(tmp_path)


def test_a_driver_that_ended_holds_nothing(tmp_path: Path) -> None:
    """Its process lives on, as a notebook's does."""
    run = Folder(tmp_path)
    lease = leases.claim(run, "driver", trains=False)
    group = leases.claim(run, "driver", again=True)
    assert group.driver == lease.term
    leases.end(run, group.term)
    assert isinstance(apart(_claim, str(tmp_path)), RunExists)
    leases.end(run, lease.term)
    assert apart(_claim, str(tmp_path)) is None


def _claim(url: str) -> Exception | None:
    try:
        leases.claim(Folder(url), "another")
    except RunExists as error:
        return error
    return None
