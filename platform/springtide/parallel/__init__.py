"""Sharding of a model over a mesh. Rule: parallelism is applied from outside, in one visible order; gradients are summed."""

from springtide.parallel.compiled import gave_up, uncompiled
from springtide.parallel.fsdp import in_precision, parallelize, reshard, set_gradient_sync

__all__ = ["gave_up", "in_precision", "parallelize", "reshard", "set_gradient_sync", "uncompiled"]
