"""The model laid over a mesh. Law: parallelism is applied from outside, in one visible order; gradients are summed."""

from springtide.parallel.collectives import CollectiveError, CutOff, abort, end_group, sum_over_ranks
from springtide.parallel.compiled import gave_up, uncompiled
from springtide.parallel.fsdp import parallelize, set_gradient_sync
from springtide.parallel.links import Links
from springtide.parallel.mesh import NCCL_ENVIRONMENT, World, alone, backend, device_index, process_group, world

__all__ = [
    "NCCL_ENVIRONMENT",
    "CollectiveError",
    "CutOff",
    "Links",
    "World",
    "abort",
    "alone",
    "backend",
    "device_index",
    "end_group",
    "gave_up",
    "parallelize",
    "process_group",
    "set_gradient_sync",
    "sum_over_ranks",
    "uncompiled",
    "world",
]
