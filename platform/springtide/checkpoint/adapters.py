"""Low-rank adapters in a checkpoint: tensors of the model, told by their names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from springtide.checkpoint.format import Manifest

LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
"""Last part of the names of an adapter's tensors; the part before is that of the matrix that it adapts."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter of the decoder.

    Examples:
        >>> is_adapter("blocks.0.attention.query.lora_a"), is_adapter("blocks.0.attention.query.weight")
        (True, False)
    """
    return name.rpartition(".")[2] in (LORA_A, LORA_B, MAGNITUDE)


def without_adapter(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``tensors``, by name, that are not part of an adapter."""
    return {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}


def has_adapter(manifest: Manifest) -> bool:
    """Return whether the checkpoint of ``manifest`` holds an adapter, by the config that it was saved with."""
    model = manifest.config.get("model") if manifest.config else None
    return isinstance(model, dict) and model.get("adapter", "none") != "none"
