"""The model that a config names: the decoder of this package, or a user's own.

``model.source`` names a user's model, ``package.module:function``, called as ``function(config, vocab_size, eos_id,
bos_id)`` with the config's ``model`` section. It returns any ``nn.Module`` that

    maps ids, int64 (B, L), to logits (B, L, V) with V >= vocab_size, and is causal;
    may have ``blocks``, an ``nn.ModuleList``: each block is sharded, recomputed and compiled as a unit; without ``blocks``
    the whole model is one unit;
    may mask documents of a row from each other. ``eos_id`` and ``bos_id`` are None if no mask is needed. The function
    ``documents`` of ``springtide.model`` computes positions and mask; pass ``are_whole=True`` for a dataset of chats. The model
    need not mask the loss: the rows already determine which tokens count in the loss.

Initial weights may come from torch's generator. It is seeded with ``model.init_seed``, so they are the same on every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from springtide.config.code import find_code
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.model.decoder import build, skeleton


def make(
    config: ModelConfig,
    vocab_size: int,
    eos_id: int | None = None,
    bos_id: int | None = None,
    whole_documents: bool = False,
) -> nn.Module:
    """Return the model that a config names. springtide's decoder is on the meta device, without memory for its weights. A
    user's model has its initial weights, on the CPU. Raises ConfigError if the user's function cannot be found or returns no
    module."""
    if not config.source:
        return skeleton(config, vocab_size, eos_id, bos_id, whole_documents)
    function = find_code("model.source", config.source)
    torch.manual_seed(config.init_seed)
    model = function(config, vocab_size, eos_id, bos_id)
    if not isinstance(model, nn.Module):
        raise _problem(config.source, f"returned a {type(model).__name__}", "return an nn.Module")
    return model


def whole(
    config: ModelConfig,
    vocab_size: int,
    eos_id: int | None = None,
    bos_id: int | None = None,
    whole_documents: bool = False,
) -> nn.Module:
    """Return the model with memory for all its weights on the CPU, for a single process that loads a checkpoint into it."""
    return (make if config.source else build)(config, vocab_size, eos_id, bos_id, whole_documents)


def _problem(source: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(explain("model.source", source, what, remedy))
