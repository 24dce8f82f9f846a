"""Runs of an adapter and of preferences lose a worker, are stopped and go on with more: they end with the undisturbed bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from loops import every_tensor, train
from paired import paired
from ranks import run_ranks

import springtide as st
from springtide.config import Config
from springtide.events import Event, Saved, Started, StepDone
from springtide.ray.cluster.local import kill_worker

pytestmark = pytest.mark.cluster
STEPS = 24


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A DPO run; the reference that it starts from is there."""
    return paired(tmp_path_factory.mktemp("paired"), STEPS)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "dpo"])
def test_a_killed_and_resized_run_has_the_bits_of_the_undisturbed_one(
    kind: str, preferences: Config, ray_cluster: str
) -> None:
    """2 workers, one of them killed, then 3; the undisturbed run has one worker and no Ray."""
    config = preferences.override({"checkpoint.every_steps": 5, "elastic.notices": "off", "optim.peak_lr": 1e-2})
    if kind == "lora":
        changes = {"model.adapter": "lora", "model.adapter_rank": 4, "objective.source": "", "objective.labels": ""}
        config = config.override(changes)
    whole, killed = (config.override({"run.id": f"{kind}-{name}"}) for name in ("whole", "killed"))
    [expected] = run_ranks(1, train, whole)
    starts: list[Started] = []

    def listen(event: Event) -> None:
        if isinstance(event, Started):
            starts.append(event)
        elif isinstance(event, Saved) and len(starts) == 1:
            kill_worker()
        elif isinstance(event, StepDone) and len(starts) == 2 and event.step == starts[1].step + 2:
            os.kill(os.getpid(), signal.SIGINT)

    for workers in (2, 3):
        size = {"elastic.min_workers": workers, "elastic.max_workers": workers}
        run = st.train(killed.override(size), resume=workers == 3, listen=listen)
    assert [one.world_size for one in starts] == [2, 2, 3]
    assert 0 < starts[1].step < starts[2].step < STEPS
    assert {one.step: one.loss for one in run.steps} == {
        one.step: one.loss for one in expected if isinstance(one, StepDone)
    }
    found = run.verify()
    assert found.ok
    assert found.steps_checked == STEPS
    [state], [other] = run_ranks(1, every_tensor, whole), run_ranks(1, every_tensor, killed)
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    assert Path(run.report).exists()
