"""Distributed training: the world of ranks, collectives, the connections between ranks, and sharding and compilation of a
model.

Layer rule: parallelism is applied to a model from outside, in one visible order (``fsdp``), and gradients are summed. Import
sharding and compilation from their own files: the names exported here do not need FSDP.
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
