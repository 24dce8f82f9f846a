"""The model that a config names: the decoder of this package, or a user's own.

``model.source`` names a user's model, ``package.module:function``, called as ``function(config, vocab_size, eos_id,
bos_id)`` with the config's ``model`` section. It returns any ``nn.Module`` that

    maps ids, int64 (B, L), to logits (B, L, V) with V >= vocab_size, and no position looks ahead;
    may have ``blocks``, an ``nn.ModuleList``: each is sharded, recomputed and compiled by itself, else the model is one piece;
    may mask documents of a row from each other: the ids that end and begin them are None if they need not be
    (``model.documents`` returns positions and mask; for a dataset of chats with ``are_whole``). Which tokens count in the
    loss, the rows say.

Its initial weights may come from torch's generator, which is seeded with ``model.init_seed``: they are the same on every rank.
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
    """Return the model: the decoder on the meta device, without memory for its weights, or a user's model with its initial
    weights, on the CPU. Raises ConfigError if that function cannot be found or returns no module."""
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
    """Return the model with all its weights on the CPU, for a single process to load a checkpoint into."""
    return (make if config.source else build)(config, vocab_size, eos_id, bos_id, whole_documents)


def _problem(source: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(explain("model.source", source, what, remedy))
