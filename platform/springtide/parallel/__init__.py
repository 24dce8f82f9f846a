"""Sharding of a model over a mesh. Rule: parallelism is applied from outside, in one visible order; gradients are summed."""

from springtide.parallel.compiled import (
    compiled_artifacts,
    compiled_folder,
    gave_up,
    load_compiled,
    num_compiled,
    takes_flex,
    uncompiled,
)
from springtide.parallel.fsdp import (
    in_precision,
    parallelize,
    reduces_each,
    reshard,
    set_gradient_sync,
    weights_changed,
)
from springtide.parallel.gradient_squares import GradientSquares, watch_gradients
from springtide.parallel.offload import as_if_offloaded, weights_on

__all__ = [
    "GradientSquares",
    "as_if_offloaded",
    "compiled_artifacts",
    "compiled_folder",
    "gave_up",
    "in_precision",
    "load_compiled",
    "num_compiled",
    "parallelize",
    "reduces_each",
    "reshard",
    "set_gradient_sync",
    "takes_flex",
    "uncompiled",
    "watch_gradients",
    "weights_changed",
    "weights_on",
]
