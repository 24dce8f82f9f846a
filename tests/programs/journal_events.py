"""Events as a run writes them, for tests of what reads them."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np

from springtide.events import Decided, Evaluated, Event, Failed, Left, Saved, Started, StepDone, Stopped
from springtide.tracking.journal import last_steps
from springtide.tracking.timeline import COLUMNS, Timeline, timeline_of


def step(number: int, loss: float = 1.0, sources: tuple[str, ...] = ()) -> StepDone:
    return StepDone(
        extra={
            **{f"loss/{name}": loss + place for place, name in enumerate(sources)},
            **{f"step_tokens/{name}": 10.0 // len(sources) for name in sources},
            **{f"epochs/{name}": number / 4 for name in sources},
        },
        step=number,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=number * 10,
        step_tokens=10,
        step_time_s=0.5,
        data_wait_s=0.1,
        tokens_per_s=20.0,
        mfu=0.5,
        memory_bytes=1,
        world_size=2,
        digest="00",
    )


def assert_same(found: Timeline, events: list[Event]) -> None:
    """The timeline has the events, and the last try of each step."""
    expected = timeline_of(events)
    assert found.placed == expected.placed
    steps = last_steps(events)
    for name in COLUMNS:
        np.testing.assert_array_equal(found.steps[name], np.array([getattr(one, name) for one in steps], float))
    for name in expected.steps.extra:
        known = np.array([one.extra.get(name, math.nan) for one in steps])
        np.testing.assert_array_equal(found.steps.extra[name], known)


def life(seed: int, starts: int = 12) -> list[Event]:
    """The events of a run with restarts, evaluations, saves and words of the controller, as they arrive."""
    chance, now, at, events = random.Random(seed), 1000.0, 0, list[Event]()
    for start in range(starts):
        term = 1 + start // 3
        now += chance.random() * 20
        workers = chance.randint(1, 4)
        at = max(0, at - chance.randint(0, 6))
        events.append(Started(step=at, world_size=workers, time_s=now, term=term, markets=["spot"] * workers))
        for _ in range(chance.randint(0, 40)):
            took = chance.random()
            now += took * chance.choice([1.0, 1.0, 1.0, 1.5])
            at += 1
            extra = {"loss/wiki": chance.random()} if chance.random() < 0.5 else {}
            loss = math.nan if chance.random() < 0.05 else chance.random()
            one = dataclasses.replace(step(at, loss), time_s=now, term=term, step_time_s=took, extra=extra)
            used = {"energy_j": chance.random() * 10, "energy_between_j": chance.choice([0.0, 1.0, 20.0, -1.0])}
            events.append(dataclasses.replace(one, data_wait_s=chance.random() * 0.3, world_size=workers, **used))
            if chance.random() < 0.1:
                now += chance.random()
                events.append(
                    Evaluated(step=at, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1, time_s=now, term=term)
                )
            if chance.random() < 0.1:
                events.append(Saved(step=at, name="s", size_bytes=1, save_time_s=0.1, time_s=now, term=term))
            if chance.random() < 0.1:  # of another thread: its time is before that of the step that was written first
                events.append(Decided(step=at, decision="stay", reason="waiting", time_s=now - took / 2, term=term))
        if chance.random() < 0.5:
            events.append(Left(step=at, kept_in="memory", time_s=now, term=term))
        elif chance.random() < 0.5:
            events.append(Failed(step=at, cause="lost nodes", reason="x", again=True, time_s=now, term=term))
    return [*events, Stopped(step=at, status="finished", time_s=now, term=1 + (starts - 1) // 3)]
