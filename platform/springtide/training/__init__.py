"""Training in plain torch: state, optimizer, schedule, step, loop, parts. Rule: no Ray here; batches, requests and events pass
through interfaces, and the same loop runs under torchrun."""

from springtide.training.group_context import GroupContext
from springtide.training.loop import Feed, TrainLoop
from springtide.training.message import StepMessage
from springtide.training.part import Part, Share, StepResult, Verdict, Work
from springtide.training.step import StepSetup, train_step

__all__ = [
    "Feed",
    "GroupContext",
    "Part",
    "Share",
    "StepMessage",
    "StepResult",
    "StepSetup",
    "TrainLoop",
    "Verdict",
    "Work",
    "train_step",
]
