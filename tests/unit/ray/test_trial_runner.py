"""A run of a trial in its thread: which messages come of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journal_events import step

from springtide import config as configs
from springtide.config import Config
from springtide.errors import RunExists, TrainingFailed
from springtide.events import Evaluated, Event, Stopped
from springtide.ray.tune import trial_runner
from springtide.ray.tune.trial_runner import Failed, Finished, ReportWriter, TrialRunner
from springtide.storage import Folder
from springtide.tracking.journal import Journal


class Workers:
    """A lender of no workers, that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stopped = threading.Event()
        self.share = SimpleNamespace(closed=lambda: self.is_closed)
        self.is_closed = False

    def claim(self, config: Config) -> None:
        self.asked.append("claim")

    def free(self) -> None:
        self.asked.append("free")

    def ask(self, interrupt: object) -> None:
        self.stopped.set()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configs.recipes.tiny().override({"run.root": str(tmp_path), "run.id": "trial-0000"})


def at(step: int) -> Evaluated:
    return Evaluated(step=step, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1)


def told(runner: TrialRunner) -> object:
    """Return the next message; the step of an evaluation."""
    message = runner.next()
    return message.step if isinstance(message, Evaluated) else message


def runner_of(config: Config, train: Callable[..., None], workers: Workers | None = None) -> TrialRunner:
    return TrialRunner(config, train, workers or Workers(), ReportWriter(lambda run: None))  # type: ignore[arg-type]


def started_before(config: Config, *events: Event) -> None:
    run = Folder(config.run.root) / config.run.id
    run.write(configs.RUN_CONFIG, configs.dump(config))
    with Journal(run) as journal:
        for event in events:
            journal(event)


def test_evaluations_come_first_then_the_end(config: Config) -> None:
    workers, reported = Workers(), list[Folder]()
    started_before(config, step(9), at(10))

    def train(config: Config, *, resume: bool, listen: Callable[[Event], None], **named: object) -> None:
        assert resume
        listen(step(19))
        listen(at(20))

    reports = ReportWriter(reported.append)
    runner = TrialRunner(config, train, workers, reports)  # type: ignore[arg-type]
    runner.start(decided=False, saved_only=False)
    assert [told(runner) for _ in range(3)] == [10, 20, Finished()]
    runner.stop()
    reports.wait()
    assert [one.step for one in runner.steps] == [9, 19]
    assert workers.asked == ["claim", "free"]
    assert reported == [runner.folder]


@pytest.mark.parametrize(("status", "decided"), [("finished", False), ("stopped", True)])
def test_what_has_ended_is_not_trained_again(config: Config, status: Any, decided: bool) -> None:
    started_before(config, at(10), Stopped(step=10, status=status, reason=""))
    runner = runner_of(config, lambda config, **named: pytest.fail("it trains"))
    runner.start(decided=decided, saved_only=False)
    assert [told(runner), told(runner)] == [10, Finished()]


@pytest.mark.parametrize(
    ("status", "decided", "settled"),
    [("finished", False, 30), ("stopped", True, 30), ("stopped", False, 20), ("", False, 20)],
)
def test_all_but_the_newest_evaluation_of_an_earlier_start_were_judged_then(
    config: Config, status: Any, decided: bool, settled: int
) -> None:
    """The newest may have come when nobody heard it any more."""
    ends = [Stopped(step=30, status=status, reason="")] if status else []
    started_before(config, at(10), at(20), at(30), *ends)
    runner = runner_of(config, lambda config, **named: None)
    assert runner.judged_step == 0
    runner.start(decided=decided, saved_only=False)
    assert runner.judged_step == settled


def test_a_rung_whose_state_was_not_saved_is_evaluated_again(config: Config) -> None:
    started_before(config, step(9), at(10))
    runner = runner_of(config, lambda config, **named: None)
    runner.start(decided=False, saved_only=True)
    assert runner.next() == Finished()
    assert [one.step for one in runner.steps] == [9]


def test_an_error_is_a_message(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runner, "_FREE_S", 0.0)
    monkeypatch.setattr(trial_runner, "_ASK_AGAIN_S", 0.0)
    for error in (RunExists("held by lease 2"), TrainingFailed("skipped, the last one"), KeyboardInterrupt()):

        def train(config: Config, error: BaseException = error, **named: object) -> None:
            raise error

        runner = runner_of(config, train)
        runner.start(decided=False, saved_only=False)
        assert runner.next() == Failed(error)


def test_a_run_that_is_held_is_tried_until_it_is_free(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runner, "_ASK_AGAIN_S", 0.0)
    tries = []

    def train(config: Config, **named: object) -> None:
        tries.append(config)
        if len(tries) < 3:
            raise RunExists("held by lease 2")

    runner = runner_of(config, train)
    runner.start(decided=False, saved_only=False)
    assert runner.next() == Finished()
    assert len(tries) == 3


def test_it_stops_the_run_when_the_pool_is_closed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runner, "_LOOK_S", 0.01)
    workers = Workers()
    runner = runner_of(config, lambda config, **named: workers.stopped.wait(), workers)  # type: ignore[arg-type, return-value]
    runner.start(decided=False, saved_only=False)
    workers.is_closed = True
    began = time.monotonic()
    assert runner.next() == Finished()
    assert workers.stopped.is_set(), "Tune gives its process ten seconds from then on"
    assert workers.asked == ["claim", "free"]
    assert time.monotonic() - began < 60
