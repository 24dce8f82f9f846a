"""Models as plain ``nn.Module``, and training objectives.

Layer rule: a model depends only on its config, not on ranks, devices or files. An objective (``objective.py``) is the loss
function of a micro-batch; its results are sums over tokens or rows, never means.
"""

from springtide.model.adapter import AdaptedLinear, matrices, merged
from springtide.model.attention import KVCache
from springtide.model.decoder import (
    Decoder,
    build,
    fill,
    flops_per_token,
    hardware_flops_per_token,
    initial,
    num_parameters,
    skeleton,
)
from springtide.model.frozen import as_held, converted, packed_shapes
from springtide.model.loss import IGNORE_INDEX, LargestLogit, are_watched, logits_watched, see_logits
from springtide.model.positions import document_begins, documents
from springtide.model.source import make, whole

__all__ = [
    "IGNORE_INDEX",
    "AdaptedLinear",
    "Decoder",
    "KVCache",
    "LargestLogit",
    "are_watched",
    "as_held",
    "build",
    "converted",
    "document_begins",
    "documents",
    "fill",
    "flops_per_token",
    "hardware_flops_per_token",
    "initial",
    "logits_watched",
    "make",
    "matrices",
    "merged",
    "num_parameters",
    "packed_shapes",
    "see_logits",
    "skeleton",
    "whole",
]
