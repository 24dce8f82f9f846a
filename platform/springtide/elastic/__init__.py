"""Decisions as values. Law: no I/O, no clock of its own, no torch; what a room does with a decision is its own affair."""

from springtide.elastic.cadence import Cadence, cadence, mean_time_to_loss, snapshot_every
from springtide.elastic.geometry import largest_micro_batch, micro_batches
from springtide.elastic.interrupt import Interrupt

__all__ = [
    "Cadence",
    "Interrupt",
    "cadence",
    "largest_micro_batch",
    "mean_time_to_loss",
    "micro_batches",
    "snapshot_every",
]
