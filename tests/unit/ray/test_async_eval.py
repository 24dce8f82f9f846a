"""Evaluations in the background, and what becomes of them when training ends; Ray is faked, on a clock of its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.config.steps import StepsDone
from springtide.events import Evaluated, Event, Saved, Stopped
from springtide.ray.train import driver_listeners as async_eval
from springtide.ray.train.driver_listeners import AsyncEvaluations


class Evaluator:
    """A run whose evaluations take ``takes_s`` each: what its listener heard and when, and which process was ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: float) -> None:
        self.now_s, self.heard, self.ended_s = 0.0, list[tuple[float, Event]](), list[float]()
        self._takes_s = takes_s
        ray = SimpleNamespace(wait=self._wait, get=lambda ref: ref[1], kill=lambda _: self.ended_s.append(self.now_s))
        monkeypatch.setattr(async_eval, "ray", ray)
        actor = SimpleNamespace(evaluate=SimpleNamespace(remote=self._evaluate))
        monkeypatch.setattr(AsyncEvaluations, "_started", lambda evaluations: actor)
        config: Any = SimpleNamespace(train=SimpleNamespace(eval_every=10), num_steps=1000)
        run: Any = None
        self.tell = AsyncEvaluations(config, run, lambda event: self.heard.append((self.now_s, event)))

    def _evaluate(self, name: str) -> tuple[float, Evaluated]:
        step = StepsDone(int(name.partition("-")[2]))
        return self.now_s + self._takes_s, Evaluated(step=step, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1)

    def _wait(self, refs: list[tuple[float, Evaluated]], timeout: float) -> tuple[list[Any], list[Any]]:
        [(at_s, _)] = refs
        self.now_s = max(self.now_s, min(at_s, self.now_s + timeout))
        return (refs, []) if at_s <= self.now_s else ([], refs)

    def saves(self, *steps: int) -> None:
        for step in steps:
            self.tell(Saved(step=step, name=f"step-{step}", size_bytes=1, written_bytes=1, save_time_s=0.1))

    @property
    def told(self) -> list[tuple[float, str, int]]:
        return [(at_s, event.kind, event.step) for at_s, event in self.heard]


def test_a_stop_waits_for_no_evaluation_and_none_is_told_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Evaluator(monkeypatch, takes_s=math.inf)
    run.saves(10, 20)
    run.tell(Stopped(step=20, status="stopped", reason="asked to; saved at step 20"))
    assert run.told == [(0, "saved", 10), (0, "saved", 20), (0, "stopped", 20)]
    assert run.ended_s == [0.0]


def test_a_stop_tells_the_result_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Evaluator(monkeypatch, takes_s=5.0)
    run.saves(10, 20)
    run.now_s = 6.0
    run.tell(Stopped(step=20, status="stopped"))
    assert run.told[2:] == [(6, "evaluated", 10), (6, "stopped", 20)]


def test_a_run_that_finishes_waits_for_its_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Evaluator(monkeypatch, takes_s=5.0)
    run.saves(10, 20)
    run.tell(Stopped(step=1000, status="finished"))
    assert run.told[2:] == [(5, "evaluated", 10), (10, "evaluated", 20), (10, "stopped", 1000)]
