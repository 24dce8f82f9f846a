"""Text that arrives while a run trains is read from a step on, on the same workers, and Ctrl-C still ends the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from following import arrive, config_of
from loops import train
from ranks import run_ranks

import springtide as st
from springtide.app import take_up
from springtide.app.follow import follow
from springtide.config import Config
from springtide.events import Event, Started, StepDone
from springtide.run.take_up import read_take_ups

pytestmark = pytest.mark.cluster


def test_a_run_reads_new_text_without_being_started_again(
    tiny: Config, ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_up, "LOOK_S", 0.2)
    source, root = tmp_path / "text", tmp_path / "sets"

    def seal(name: str, seed: int) -> None:
        arrive(source, name, seed)
        [_] = follow(config_of(source, root), once=True, at_least_bytes=1, wait=lambda _: None)

    seal("first", 0)
    shards = config_of(source, root).shards.model_dump(exclude={"root"})
    fixed: dict[str, Any] = {f"shards.{name}": value for name, value in shards.items()}
    fixed |= {"stream.follow": str(root), "shards.dataset": "", "stream.max_epochs": 1e6, "stream.lanes": 6}
    fixed |= {"parallel.reduction": "fp64", "train.total": "1B", "train.eval_tokens": 0, "optim.warmup": 0}
    config = tiny.override({**fixed, "run.id": "follows", "elastic.min_workers": 2, "elastic.max_workers": 2})
    starts: list[Started] = []

    def listen(event: Event) -> None:
        if isinstance(event, Started):
            starts.append(event)
        elif isinstance(event, StepDone) and event.step == starts[-1].step + 3:
            if len(starts) < 2:
                seal("later", 1)
            else:
                os.kill(os.getpid(), signal.SIGINT)

    run = st.train(config, listen=listen)
    assert run.status == "stopped"
    records = read_take_ups(run.folder)
    assert [one.from_step for one in records] == [one.step for one in starts] == sorted({one.step for one in starts})
    assert len(records) == 2
    assert run.verify().ok
    steps = {one.step: one.loss for one in run.steps}
    [whole] = run_ranks(1, train, run.config.override({"run.id": "whole"}), max(steps))
    assert steps == {one.step: one.loss for one in whole if isinstance(one, StepDone)}
