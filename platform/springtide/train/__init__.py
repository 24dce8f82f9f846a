"""Plain torch: state, optimizer, schedule, step, loop. Law: no Ray here; batches, interrupts and events pass through
seams, and the same loop runs under torchrun."""

from springtide.train.loop import Feed, Run
from springtide.train.step import StepResult, train_step

__all__ = ["Feed", "Run", "StepResult", "train_step"]
