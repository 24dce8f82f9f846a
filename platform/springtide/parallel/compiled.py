"""Blocks compiled for one shape, and what is said where that fails. The only file that touches Dynamo."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

_RECOMPILES = 64
"""Graphs of a block: of each size of micro-batch that the world sizes of a process lead to, with gradients and without."""
_ALL_RECOMPILES = 1024
_LIMIT_HIT = "recompile limit"


def compile_block(block: nn.Module) -> None:
    """Compile ``block`` in place when it is first called. Each shape it meets has a graph of its own: the second one would else
    be dynamic in every size, and its kernels slower."""
    settings: Any = torch._dynamo.config
    for name, least in {"recompile_limit": _RECOMPILES, "accumulated_recompile_limit": _ALL_RECOMPILES}.items():
        if hasattr(settings, name):  # a setting of Dynamo's own, which may be renamed
            setattr(settings, name, max(getattr(settings, name), least))
    block.compile(dynamic=False)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """In its block, compiled blocks run as they are written."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else contextlib.nullcontext()


def gave_up() -> str:
    """Why blocks run as they are written in this process although they should be compiled; empty where none does."""
    counted: Any = getattr(getattr(torch._dynamo, "utils", None), "counters", {}).get("unimplemented", {})
    if not any(_LIMIT_HIT in reason for reason in counted):
        return ""
    return (
        "Dynamo hit its recompile limit: blocks met too many shapes, and those of new ones run without parallel.compile from "
        "now on (TORCH_LOGS=recompiles says why)"
    )
