"""Sharding of a model over a mesh. Rule: parallelism is applied from outside, in one visible order; gradients are summed."""

from springtide.parallel.compiled import gave_up, uncompiled
from springtide.parallel.float8 import forget_scales
from springtide.parallel.fsdp import in_precision, parallelize, reduces_each, reshard, set_gradient_sync
from springtide.parallel.gradient_squares import GradientSquares, watch_gradients
from springtide.parallel.offload import as_if_offloaded, weights_on

__all__ = [
    "GradientSquares",
    "as_if_offloaded",
    "forget_scales",
    "gave_up",
    "in_precision",
    "parallelize",
    "reduces_each",
    "reshard",
    "set_gradient_sync",
    "uncompiled",
    "watch_gradients",
    "weights_on",
]
