"""Compilation of blocks, each shape by itself, and the reason where it stops. The only file that touches Dynamo."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

_RECOMPILES = 64
"""Graphs of a block: one per micro-batch size at the world sizes of a process, with gradients and without."""
_ALL_RECOMPILES = 1024
_LIMIT_HIT = "recompile limit"


def compile_block(block: nn.Module) -> None:
    """Compile ``block`` in place at its first call. Each shape gets its own graph: otherwise the second one would be dynamic
    in every size, with slower kernels."""
    settings: Any = torch._dynamo.config
    for name, least in {"recompile_limit": _RECOMPILES, "accumulated_recompile_limit": _ALL_RECOMPILES}.items():
        if hasattr(settings, name):  # a private setting of Dynamo, which may be renamed
            setattr(settings, name, max(getattr(settings, name), least))
    block.compile(dynamic=False)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which compiled blocks run eagerly."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else contextlib.nullcontext()


def gave_up() -> str:
    """Return why some blocks run eagerly in this process although they should be compiled; empty if none does."""
    counted: Any = getattr(getattr(torch._dynamo, "utils", None), "counters", {}).get("unimplemented", {})
    if not any(_LIMIT_HIT in reason for reason in counted):
        return ""
    return (
        "Dynamo hit its recompile limit: blocks met too many shapes, and new shapes run without parallel.compile from now on "
        "(TORCH_LOGS=recompiles shows why)"
    )
