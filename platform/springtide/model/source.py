"""Which model a config means: the decoder of this package, or a user's own.

A user's is what ``model.source`` names, ``package.module:function``, called as ``function(config, vocab_size, eos_id)`` with
the config's ``model`` section. It returns any ``nn.Module`` that

    maps ids, int64 (B, L), to logits (B, L, V) with V >= vocab_size, position by position, none of which looks ahead;
    may have ``blocks``, an ``nn.ModuleList``: each is sharded, recomputed and compiled by itself, else the model is one piece;
    may have ``eos_id``, the id after which nothing is predicted, where documents of a row are kept apart.

Its first weights may come from torch's generator, which is seeded with ``model.init_seed``: they are the same on every rank.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import nn

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.model.decoder import build, skeleton


def make(config: ModelConfig, vocab_size: int, eos_id: int | None = None) -> nn.Module:
    """The model: the decoder without memory for its weights, on the meta device, or a user's with its first weights, on the
    CPU. ConfigError when there is no such function."""
    if not config.source:
        return skeleton(config, vocab_size, eos_id)
    function = find(config.source)
    torch.manual_seed(config.init_seed)
    model = function(config, vocab_size, eos_id)
    if not isinstance(model, nn.Module):
        raise _problem(config.source, f"returned a {type(model).__name__}", "return an nn.Module")
    return model


def whole(config: ModelConfig, vocab_size: int, eos_id: int | None = None) -> nn.Module:
    """The same with all its weights on the CPU, for a process alone to load them into."""
    return make(config, vocab_size, eos_id) if config.source else build(config, vocab_size, eos_id)


def find(source: str) -> Callable[..., object]:
    """The function that ``source`` names; modules are looked for in the current folder too, after all that is installed. Who
    calls has seen to it that this code may run (``config.check_trusted``)."""
    module, _, name = source.partition(":")
    if not module or not name:
        raise _problem(source, "is not package.module:function", "for example mine.model:build")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file that lies about must not take the place of an installed package
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _problem(
            source, f"cannot be imported ({error})", "start from the folder it lies in, or install it"
        ) from None
    if not callable(function):
        raise _problem(source, "is no function", "name one that returns an nn.Module")
    found: Callable[..., object] = function
    return found


def _problem(source: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(explain("model.source", source, what, remedy))
