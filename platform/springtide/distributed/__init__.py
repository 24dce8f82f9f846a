"""Distributed training: ranks and their process group, collectives, connections between ranks, sharding and compilation of a
model.

Layer rule: a model does not contain parallelism. ``fsdp`` applies it from outside, in one visible order of steps. Gradients are
summed over ranks, not averaged. Import sharding and compilation from their own files: the names exported here work without
FSDP.
"""

from springtide.distributed.collectives import (
    CollectiveError,
    CutOff,
    abort,
    agreed,
    by_rank,
    end_group,
    gathered,
    on_first,
    rank_here,
    shifted,
    sum_over_ranks,
)
from springtide.distributed.connections import Connections
from springtide.distributed.world import (
    World,
    alone,
    backend,
    device_index,
    gpu_environment,
    process_group,
    why_no_gpu,
    world,
)

__all__ = [
    "CollectiveError",
    "Connections",
    "CutOff",
    "World",
    "abort",
    "agreed",
    "alone",
    "backend",
    "by_rank",
    "device_index",
    "end_group",
    "gathered",
    "gpu_environment",
    "on_first",
    "process_group",
    "rank_here",
    "shifted",
    "sum_over_ranks",
    "why_no_gpu",
    "world",
]
