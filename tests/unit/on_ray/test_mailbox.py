"""The mailbox of one run after the other, without Ray: its actor's methods are called as they are."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from springtide.config import recipes
from springtide.elastic import Interrupt
from springtide.events import Decided, Evaluated, Left
from springtide.on_ray.train.mailbox import Mailbox, MailboxClient, Progress
from springtide.on_ray.train.worker import TrainJob

EVALUATED = Evaluated(step=1, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1)
LEFT = Left(step=3, kept_in="memory")


def test_events_arrive_in_order_and_the_workers_get_the_request_with_the_next_post() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        assert await mailbox.post("a", [EVALUATED, LEFT]) is None
        await mailbox.ask("a", Interrupt.SAVE)
        assert await mailbox.post("a", []) is Interrupt.SAVE
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


@pytest.mark.parametrize("leaving", [Interrupt.LEAVE, Interrupt.EVACUATE])
def test_a_request_to_leave_ends_with_its_group_and_replaces_none_to_stop(leaving: Interrupt) -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.ask("a", leaving)
        assert await mailbox.post("a", [LEFT]) is leaving
        await mailbox.reset_for_new_group("a")
        assert await mailbox.post("a", []) is None
        await mailbox.ask("a", Interrupt.STOP)
        await mailbox.ask("a", leaving)
        await mailbox.reset_for_new_group("a")
        assert await mailbox.post("a", []) is Interrupt.STOP

    asyncio.run(run())


def test_progress_is_that_of_the_group_and_the_controllers_own_events_are_no_sign_of_life() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 5.0)
        await mailbox.post("a", [Decided(step=0, decision="stay", reason="")])
        assert (await mailbox.progress("a")) == Progress()
        await mailbox.post("a", [LEFT])
        await asyncio.sleep(0.01)
        progress = await mailbox.progress("a")
        assert progress is not None
        assert progress.left
        assert progress.silent_s > 0
        await mailbox.reset_for_new_group("a")
        assert (await mailbox.progress("a")) == Progress()

    asyncio.run(run())


def test_what_comes_late_for_an_ended_run_changes_nothing_in_the_next() -> None:
    async def run() -> None:
        mailbox = Mailbox("a", 10, 0.0)
        await mailbox.limit_micro_batch("a", 4)
        assert await mailbox.largest_micro_batch("a") == 4
        await mailbox.open("b", 10, 0.0)
        assert await mailbox.post("a", [EVALUATED, LEFT]) is None
        await mailbox.ask("a", Interrupt.STOP)
        await mailbox.limit_micro_batch("a", 2)
        await mailbox.reset_for_new_group("a")
        assert await mailbox.progress("a") is None
        assert await mailbox.largest_micro_batch("a") is None
        assert await mailbox.largest_micro_batch("b") is None
        assert await mailbox.progress("b") == Progress()
        assert await mailbox.take("b", 0.0) == []
        assert await mailbox.post("b", []) is None

    asyncio.run(run())


def test_a_job_is_the_same_in_another_process() -> None:
    job = TrainJob(recipes.tiny(), MailboxClient("an actor's handle", "a"), {"team": "us"}, "me")
    assert pickle.loads(pickle.dumps(job)) == job
