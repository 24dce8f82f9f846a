"""Low-rank adapters (LoRA) in a checkpoint. Their tensors are recognized by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from springtide.checkpoint.format import Manifest

LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
"""Last part of the name of an adapter's tensor. Example: ``attention.query.lora_a`` adapts the matrix ``attention.query``."""


def is_adapter(name: str) -> bool:
    """Return True if the parameter ``name`` is part of a low-rank adapter.

    Examples:
        >>> is_adapter("blocks.0.attention.query.lora_a"), is_adapter("blocks.0.attention.query.weight")
        (True, False)
    """
    return name.rpartition(".")[2] in (LORA_A, LORA_B, MAGNITUDE)


def without_adapter(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` (name -> tensor) without the tensors of low-rank adapters."""
    return {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}


def has_adapter(manifest: Manifest) -> bool:
    """Return True if the checkpoint holds a low-rank adapter, according to the config stored in its ``manifest``."""
    model = manifest.config.get("model") if manifest.config else None
    return isinstance(model, dict) and model.get("adapter", "none") != "none"
