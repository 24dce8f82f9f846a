"""Training in plain torch: state, optimizer, schedule, step, loop, and parts (the features of a step).

Layer rule: nothing here imports Ray. Batches, requests and events pass through interfaces, so the same loop runs with torchrun.
"""

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
