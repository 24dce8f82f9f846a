"""Ranks: the world they form, the collectives they call, their connections, which can be cut; and a model sharded over them.

Layer rule: parallelism is applied to a model from outside, in one visible order (``fsdp``); gradients are summed. What shards
and compiles is imported from its own file: the names here need no FSDP.
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
