"""Parts that a user may write, right and wrong ones, and a run that has them."""

from __future__ import annotations

from typing import Any

import torch
from loops import feed, open_run

from springtide.config import Config
from springtide.distributed import World
from springtide.errors import ConfigError
from springtide.events import StepDone
from springtide.training import Part, Share, StepMessage, StepResult, TrainLoop, Verdict


class LongestRow(Part):
    """Tells how many tokens of a step's longest row are predicted."""

    def contribute(self, message: StepMessage, share: Share) -> None:
        longest = share.row_tokens.max() if len(share.row_tokens) else torch.zeros(())
        message.by_rank("longest row", longest)

    def receive(self, result: StepResult) -> None:
        result.extra["longest_row"] = max(result.agreed["longest row"])


class Fails(Part):
    """Fails on one rank in one way."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def contribute(self, message: StepMessage, share: Share) -> None:
        step, fails = share.work.step + 1, self.rank == (0 if self.how.endswith("rank 0") else 1)
        if fails and (self.how == "raises at once" or (self.how.startswith("raises") and step == 3)):
            raise (ConfigError if self.how == "raises ours" else ZeroDivisionError)(f"at step {step}")
        if fails and self.how == "twice" and step == 2:
            message.sum("loss", 1.0)
        name = "other" if fails and self.how == "another name at once" else "mine"
        length = 2 if fails and self.how == "another length" and step == 3 else 1
        message.sum(name, torch.ones(length))


def train_with(world: World, config: Config, how: str) -> Any:
    """Train with a part; the figures that it adds, or the error."""
    part = LongestRow() if how == "longest" else Fails(world.rank, how)
    try:
        events = list(open_run(world, config).events(feed, lambda: None, [part]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [event.extra["longest_row"] for event in events if isinstance(event, StepDone)]


class EndsAtOnce(Part):
    """Ends the run after its first step."""

    def verdict(self, result: StepResult) -> Verdict:
        return Verdict.STOP


def ends_at_once(loop: TrainLoop) -> list[Part]:
    """Two parts."""
    return [Part(), EndsAtOnce()]


def raises(loop: TrainLoop) -> Part:
    """Raises."""
    raise ZeroDivisionError("of the user's own")


def returns_none(loop: TrainLoop) -> None:
    """Returns nothing."""


def returns_others(loop: TrainLoop) -> list[str]:
    """Returns no part."""
    return ["part"]


def takes_none() -> Part:
    """Takes nothing."""
    return Part()
