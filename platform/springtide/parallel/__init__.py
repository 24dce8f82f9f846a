"""The model laid over a mesh. Law: parallelism is applied from outside, in one visible order; gradients are summed."""

from springtide.parallel.fsdp import parallelize, set_gradient_sync
from springtide.parallel.links import Links
from springtide.parallel.mesh import World, alone, backend, process_group, world

__all__ = ["Links", "World", "alone", "backend", "parallelize", "process_group", "set_gradient_sync", "world"]
