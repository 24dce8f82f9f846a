"""Decide when a run's worker groups start, grow and end. Functions return decisions as values; callers carry them out. Rule for
this package: no I/O, no torch, no clock; callers pass the time."""

from springtide.elastic.forecast import (
    ASSUMED_LOSS_S,
    SaveInterval,
    mean_time_to_loss,
    snapshot_every,
    young_daly_interval,
)
from springtide.elastic.group_request import GroupRequest

__all__ = [
    "ASSUMED_LOSS_S",
    "GroupRequest",
    "SaveInterval",
    "mean_time_to_loss",
    "snapshot_every",
    "young_daly_interval",
]
