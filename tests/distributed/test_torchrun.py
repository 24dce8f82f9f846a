"""Real agents of torchrun that are asked to end, join, and are killed: the group saves, and others continue."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import PATIENCE_S, Agent, Nodes, nodes
from loops import train_as_torchrun_does

import springtide as st
from springtide.checkpoint.format import committed
from springtide.config import Config
from springtide.errors import RunExists
from springtide.events import Left, Started, StepDone

pytestmark = pytest.mark.distributed
STEPS = 12


def config_of(tiny: Config, name: str) -> Config:
    """A run of twelve steps with exact sums, which saves only when it leaves and at its end."""
    changes = {
        "run.id": name,
        "train.total": 12 * 64 * STEPS,
        "optim.warmup": 0,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.stage": "/dev/shm",
        "parallel.reduction": "fp64",
        "elastic.notices": "file",
    }
    return tiny.override(changes)


def trains(there: Nodes, at: int, size: int) -> None:
    """Wait until the newest group has ``size`` workers and has done step ``at``."""

    def reached() -> bool:
        events = there.events()
        starts = [one for one in events if isinstance(one, Started)]
        return (
            bool(starts)
            and starts[-1].world_size == size
            and isinstance(events[-1], StepDone)
            and events[-1].step == at
        )

    there.wait_for(f"step {at} of {size} workers", reached)


def asked(there: Nodes, agent: Agent, why: str) -> None:
    """Wait until a worker of this node has heard that it is to leave."""
    there.wait_for(f"the worker hears {why}", lambda: f"asked to leave ({why}" in agent.said)


def contents(there: Nodes) -> dict[str, bytes]:
    """Every file of the run."""
    return {name: there.run.read(name) for name in there.run.files()}


def started(there: Nodes) -> list[tuple[int, int]]:
    """(step, workers) of every group so far."""
    return [(one.step, one.world_size) for one in there.events() if isinstance(one, Started)]


@pytest.mark.full
def test_nodes_leave_join_and_die_and_the_run_is_the_uninterrupted_one(
    tiny: Config, tmp_path: Path, ranks: Callable[..., list[Any]]
) -> None:
    whole, config = config_of(tiny, "whole"), config_of(tiny, "torn")
    ranks(1, train_as_torchrun_does, whole)
    with nodes(tmp_path, config) as there:
        keeper, leaver = there.start(), there.start()
        there.let_pass(3)
        trains(there, 3, 2)
        leaver.process.send_signal(signal.SIGTERM)
        asked(there, leaver, "SIGTERM")
        there.let_pass(4)
        assert leaver.process.wait(PATIENCE_S) == 1  # torchrun's own status after a signal
        there.let_pass(5)
        trains(there, 5, 1)  # the other node continues, alone

        before = contents(there)
        with pytest.raises(RunExists, match="is held by lease 3, begun"):
            st.train(config, resume=True)
        assert contents(there) == before  # it waits for its next batch

        joiner = there.start()
        asked(there, keeper, "SIGTERM")  # torchrun's word for: another node waits
        there.let_pass(6)
        there.wait_for("the second group of two", lambda: started(there)[-1] == (6, 2))
        there.let_pass(8)
        trains(there, 8, 2)
        joiner.kill()  # the other rank waits for its batch: no collective tells it
        there.wait_for("the rank ends", lambda: "another rank of its group is gone" in keeper.said)
        there.let_pass(9)
        trains(there, 9, 1)
        assert started(there) == [(0, 2), (4, 1), (6, 2), (6, 1)]  # 7 and 8 were not saved
        assert committed(there.run) == ["step-0000000004", "step-0000000006"]

        keeper.notice_file.write_text("60")
        asked(there, keeper, "a notice was left in a file")
        there.let_pass(10)
        assert keeper.process.wait(PATIENCE_S) == 1
        assert f"asks torchrun's agent (process {keeper.process.pid}) to end" in keeper.said
        assert [one.step for one in there.events() if isinstance(one, Left)] == [4, 6, 10]

    ranks(2, train_as_torchrun_does, config)  # on another day
    torn, uninterrupted = st.open_run(there.run.url), st.open_run(f"{config.run.root}/whole")
    found = torn.verify()
    assert found.ok, found
    assert found.world_sizes == (1, 2)
    assert [(one.loss, one.digest) for one in torn.steps] == [(one.loss, one.digest) for one in uninterrupted.steps]
    assert torn.starts[-1].chain  # the state says what it was trained on
