"""Communication between ranks: the world they form, the collectives they call, their connections, which can be cut.
Layer rule: knows nothing about models or checkpoints."""

from springtide.dist.collectives import (
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
from springtide.dist.connections import Connections
from springtide.dist.world import (
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
