"""The driver's side of a run, with its mailbox faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from springtide.errors import TrainingFailed
from springtide.on_ray.train import trainer


def test_a_mailbox_that_was_killed_ends_the_run_with_what_happened_and_what_to_do() -> None:
    def get() -> object:
        raise ActorDiedError

    mailbox: Any = SimpleNamespace(take=lambda wait_s: SimpleNamespace(get=get))
    with pytest.raises(TrainingFailed, match=r"mailbox, a process on the driver's node, has ended.*--resume"):
        trainer._pass_on(mailbox, lambda event: None)


def test_an_error_of_a_listener_is_its_own() -> None:
    mailbox: Any = SimpleNamespace(take=lambda wait_s: SimpleNamespace(get=lambda: ["an event"]))

    def fail(event: object) -> None:
        raise ActorDiedError  # an actor of the listener

    with pytest.raises(ActorDiedError):
        trainer._pass_on(mailbox, fail)
