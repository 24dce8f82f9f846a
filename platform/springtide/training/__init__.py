"""Training in plain torch: state, optimizer, schedule, step, loop. Rule: no Ray here; batches, interrupts and events pass
through interfaces, and the same loop runs under torchrun."""

from springtide.training.loop import Feed, TrainLoop
from springtide.training.placement import Placement
from springtide.training.step import StepResult, train_step

__all__ = ["Feed", "Placement", "StepResult", "TrainLoop", "train_step"]
