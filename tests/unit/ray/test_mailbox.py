"""The mailbox of one run after the other, without Ray: its actor's methods are called as they are."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
from types import SimpleNamespace

import pytest

from springtide.config import recipes
from springtide.elastic import GroupRequest
from springtide.elastic.forecast import RestartForecast
from springtide.events import Decided, Evaluated, Left
from springtide.preemption.notices import TimeLeft
from springtide.ray.train import mailbox as mailboxes
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import Mailbox, MailboxClient, Progress

EVALUATED = Evaluated(step=1, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1)
LEFT = Left(step=3, kept_in="memory")
NOTHING_YET = Progress(prospects=RestartForecast(step_s=math.inf))


def requested(mailbox: Mailbox) -> GroupRequest | None:
    """What the workers are asked for now."""
    return mailbox._run.request


@pytest.mark.parametrize("later", [GroupRequest.LEAVE, GroupRequest.STOP])
def test_a_save_that_was_done_takes_no_other_request_back(later: GroupRequest) -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.ask("a", GroupRequest.SAVE)
        await mailbox.cancel("a", GroupRequest.SAVE)  # the workers have it
        assert requested(mailbox) is None
        await mailbox.ask("a", GroupRequest.SAVE)
        await mailbox.ask("a", later)
        await mailbox.cancel("a", GroupRequest.SAVE)
        assert requested(mailbox) is later
        await mailbox.ask("a", GroupRequest.SAVE)
        assert requested(mailbox) is later  # who leaves or stops brings its state to safety

    asyncio.run(run())


def test_events_arrive_in_order() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.post("a", [EVALUATED, LEFT])
        assert await mailbox.take("a", 0.0) == [EVALUATED, LEFT]
        assert await mailbox.take("a", 0.0) == []

    asyncio.run(run())


def test_a_driver_that_waits_gets_the_first_event_at_once() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        taken = asyncio.create_task(mailbox.take("a", 30.0))
        await asyncio.sleep(0)
        await mailbox.post("a", [EVALUATED])
        assert await asyncio.wait_for(taken, 5.0) == [EVALUATED]

    asyncio.run(run())


def test_a_worker_that_waits_gets_each_request_at_once_and_none_of_another_group_or_run() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)

        async def waiting(
            heard: GroupRequest | None, followed: GroupRequest | None = None
        ) -> asyncio.Task[GroupRequest | None]:
            task = asyncio.create_task(mailbox.request("a", heard, followed))
            await asyncio.sleep(0)
            return task

        first = await waiting(None)
        await mailbox.ask("a", GroupRequest.SAVE)
        assert await asyncio.wait_for(first, 5.0) is GroupRequest.SAVE
        second = await waiting(None, GroupRequest.SAVE)
        assert not second.done()  # it is told once
        await mailbox.ask("a", GroupRequest.COPY)
        assert await asyncio.wait_for(second, 5.0) is GroupRequest.COPY
        await mailbox.cancel("a", GroupRequest.COPY)
        await mailbox.ask("a", GroupRequest.LEAVE)
        third = await waiting(GroupRequest.LEAVE)
        await mailbox.ask("a", GroupRequest.LEAVE)  # it has heard that
        assert not third.done()
        await mailbox.ask("a", GroupRequest.EVACUATE)
        assert await asyncio.wait_for(third, 5.0) is GroupRequest.EVACUATE
        late = await waiting(GroupRequest.EVACUATE)
        await mailbox.reset_for_new_group("a")
        assert await asyncio.wait_for(late, 5.0) is None  # calls of ended groups do not pile up
        last = await waiting(None)
        await mailbox.open("b", 10, 0.0)
        assert await asyncio.wait_for(last, 5.0) is None
        assert await mailbox.request("a", None) is None  # that run is over

    asyncio.run(run())


@pytest.mark.parametrize("leaving", [GroupRequest.LEAVE, GroupRequest.EVACUATE])
def test_a_request_to_leave_ends_with_its_group_and_replaces_none_to_stop(leaving: GroupRequest) -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.ask("a", leaving)
        await mailbox.post("a", [LEFT])
        assert requested(mailbox) is leaving
        await mailbox.reset_for_new_group("a")
        assert requested(mailbox) is None
        await mailbox.ask("a", GroupRequest.STOP)
        await mailbox.ask("a", leaving)
        await mailbox.reset_for_new_group("a")
        assert requested(mailbox) is GroupRequest.STOP

    asyncio.run(run())


def test_a_request_to_copy_comes_after_any_other_and_ends_with_its_group() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.ask("a", GroupRequest.COPY)
        await mailbox.ask("a", GroupRequest.SAVE)
        assert requested(mailbox) is GroupRequest.SAVE
        await mailbox.cancel("a", GroupRequest.SAVE)
        assert requested(mailbox) is GroupRequest.COPY
        await mailbox.cancel("a", GroupRequest.COPY)
        assert requested(mailbox) is None
        await mailbox.ask("a", GroupRequest.LEAVE)
        await mailbox.ask("a", GroupRequest.COPY)
        assert requested(mailbox) is GroupRequest.LEAVE
        await mailbox.reset_for_new_group("a")
        assert requested(mailbox) is None

    asyncio.run(run())


def test_a_group_that_leaves_asks_how_long_a_copy_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        mailbox = Mailbox("a", 10, 0.0)
        assert await mailbox.time_to_leave_s("a") == math.inf
        await mailbox.ask("a", GroupRequest.LEAVE, 30.0)
        now_s += 12.0
        assert await mailbox.time_to_leave_s("a") == 18.0
        await mailbox.ask("a", GroupRequest.LEAVE, 3.0)
        assert await mailbox.time_to_leave_s("a") == 3.0
        await mailbox.reset_for_new_group("a")
        assert await mailbox.time_to_leave_s("a") == math.inf
        assert await mailbox.time_to_leave_s("another run") is None

    now_s = 1000.0
    asyncio.run(run())


def test_progress_is_that_of_the_group_and_the_controllers_own_events_are_no_sign_of_life() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 5.0)
        await mailbox.post("a", [Decided(step=0, decision="stay", reason="")])
        assert (await mailbox.progress("a")) == dataclasses.replace(NOTHING_YET, longest_s=60.0)
        await mailbox.post("a", [LEFT])
        await asyncio.sleep(0.01)
        progress = await mailbox.progress("a")
        assert progress is not None
        assert progress.left
        assert progress.silent_s > 0
        await mailbox.reset_for_new_group("a")
        progress = await mailbox.progress("a")
        assert progress is not None
        assert not progress.left
        assert progress.silent_s < progress.longest_s == 60.0  # from its start on: it may hang before its first step

    asyncio.run(run())


def test_a_group_that_saves_or_evaluates_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(mailboxes, "time", clock)

    async def silent_s(mailbox: Mailbox) -> float:
        progress = await mailbox.progress("a")
        assert progress is not None
        return progress.silent_s

    async def run() -> None:
        nonlocal now_s
        mailbox = Mailbox("a", 10, 5.0)
        await mailbox.post("a", [EVALUATED])
        now_s += 100.0
        assert await silent_s(mailbox) == 100.0
        await mailbox.heartbeat("a")
        assert await silent_s(mailbox) == 0.0
        now_s += 3.0
        await mailbox.heartbeat("another run")
        assert await silent_s(mailbox) == 3.0
        await mailbox.reset_for_new_group("a")
        now_s += 61.0  # the next group hangs before its first event
        assert await silent_s(mailbox) == 61.0
        await mailbox.group_runs("a", 2)  # its processes took that long to start
        assert await silent_s(mailbox) == 0.0
        now_s += 2.0
        await mailbox.group_formed("a")
        now_s += 1.0
        assert await silent_s(mailbox) == 1.0
        await mailbox.group_runs("a", 2)  # late: it changes nothing
        assert await silent_s(mailbox) == 1.0
        await mailbox.reset_for_new_group("a")
        await mailbox.group_runs("a", 2)
        progress = await mailbox.progress("a")
        assert progress is not None
        assert progress.longest_s == 8.0  # four times what the last group took to its first collective

    now_s = 1000.0
    asyncio.run(run())


def test_what_is_left_of_a_notice_runs_down_by_the_clock_of_the_driver_s_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        mailbox = Mailbox("a", 10, 5.0)
        assert await mailbox.notices("a") == {}
        await mailbox.notice("a", "x", TimeLeft(1_800_000_000_000, 30.0))
        await mailbox.notice("another run", "x", TimeLeft(1, 1.0))
        now_s += 10.0
        assert await mailbox.notices("a") == {"x": TimeLeft(1_800_000_000_000, 20.0)}
        await mailbox.notice("a", "x", TimeLeft(1_800_000_000_001, 25.0))  # of a watcher that was started again
        assert await mailbox.notices("a") == {"x": TimeLeft(1_800_000_000_000, 20.0)}
        await mailbox.notice("a", "x", TimeLeft(1_799_999_995_000, 5.0))
        assert await mailbox.notices("a") == {"x": TimeLeft(1_799_999_995_000, 5.0)}
        assert await mailbox.notices("another run") is None

    now_s = 1000.0
    asyncio.run(run())


def test_a_save_that_is_heard_does_not_take_back_a_request_to_stop() -> None:
    """A request that comes between the post that brought the first one and its cancellation."""

    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.ask("a", GroupRequest.SAVE)
        await mailbox.ask("a", GroupRequest.STOP)
        await mailbox.cancel("a", GroupRequest.SAVE)
        assert requested(mailbox) is GroupRequest.STOP
        await mailbox.ask("a", GroupRequest.SAVE)
        assert requested(mailbox) is GroupRequest.STOP  # which saves, too

    asyncio.run(run())


@pytest.mark.parametrize("asked", [GroupRequest.SAVE, GroupRequest.COPY])
def test_rank_0_ends_the_request_that_it_has_heard_and_beats_once_a_second(
    monkeypatch: pytest.MonkeyPatch, asked: GroupRequest
) -> None:
    calls: list[tuple[str, object]] = []
    replies = [asked, None]
    reply = SimpleNamespace(has_come=lambda timeout_s: bool(replies), get=lambda: replies.pop(0))

    def request(heard: GroupRequest | None, followed: GroupRequest | None = None) -> SimpleNamespace:
        requested.append((heard, followed))
        return reply

    requested: list[tuple[GroupRequest | None, GroupRequest | None]] = []
    mailbox = SimpleNamespace(
        request=request,
        post=lambda events: SimpleNamespace(has_come=lambda timeout_s: True, get=lambda: None),
        heartbeat=lambda: calls.append(("heartbeat", now_s)),
    )
    now_s = 1000.0
    monkeypatch.setattr(mailboxes, "time", SimpleNamespace(monotonic=lambda: now_s))
    sender = mailboxes.EventSender(mailbox)  # type: ignore[arg-type]  # what it calls
    sender(EVALUATED)
    assert sender.interrupt() is asked
    assert sender.interrupt() is None
    assert requested == [(None, None), (None, asked), (None, None)]
    for _ in range(40):
        sender.heartbeat()
        now_s += 0.05
    assert [what for what, _ in calls] == ["heartbeat", "heartbeat"]


def test_what_comes_late_for_an_ended_run_changes_nothing_in_the_next() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.limit_micro_batch("a", 4)
        assert await mailbox.largest_micro_batch("a") == 4
        await mailbox.open("b", 10, 0.0)
        await mailbox.post("a", [EVALUATED, LEFT])
        await mailbox.ask("a", GroupRequest.STOP)
        await mailbox.limit_micro_batch("a", 2)
        await mailbox.reset_for_new_group("a")
        await mailbox.group_runs("a", 1)
        await mailbox.group_formed("a")
        assert await mailbox.progress("a") is None
        assert await mailbox.largest_micro_batch("a") is None
        assert await mailbox.largest_micro_batch("b") is None
        assert await mailbox.progress("b") == NOTHING_YET
        assert await mailbox.take("b", 0.0) == []
        assert requested(mailbox) is None

    asyncio.run(run())


def test_a_job_is_the_same_in_another_process() -> None:
    job = TrainJob(recipes.tiny(), MailboxClient("an actor's handle", "a"), {"team": "us"}, "me")
    assert pickle.loads(pickle.dumps(job)) == job
