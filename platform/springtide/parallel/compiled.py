"""Compilation of blocks, each shape by itself, and the reason where it stops. The only file that touches Dynamo."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import torch
from torch import nn

from springtide.errors import ConfigError, explain

_RECOMPILES = 64
"""Graphs of a block: one per micro-batch size at the world sizes of a process, with gradients and without."""
_ALL_RECOMPILES = 1024
_LIMIT_HIT = "recompile limit"


def compile_block(block: nn.Module) -> None:
    """Compile ``block`` in place at its first call. Each shape gets its own graph: otherwise the second one would be dynamic
    in every size, with slower kernels. Raises ConfigError if another user could have left compiled code for this one."""
    check_cache()
    settings: Any = torch._dynamo.config
    for name, least in {"recompile_limit": _RECOMPILES, "accumulated_recompile_limit": _ALL_RECOMPILES}.items():
        if hasattr(settings, name):  # a private setting of Dynamo, which may be renamed
            setattr(settings, name, max(getattr(settings, name), least))
    block.compile(dynamic=False)


def check_cache() -> None:
    """Raise ConfigError if the folder from which torch loads compiled code is not this user's alone. By default it has a known
    name in /tmp, and torch runs what it finds there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second to import

    folder = cache_dir()  # makes it, with this user's umask
    found = os.stat(folder)
    owners = {found.st_uid, os.lstat(folder).st_uid}  # of a link, too
    if owners != {os.getuid()} or found.st_mode & stat.S_IWOTH:
        whose = ", ".join(map(str, sorted(owners)))
        what = f"torch would run compiled code from {folder}, which belongs to user {whose} or can be written by others"
        remedy = "remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        raise ConfigError(explain("parallel.compile", True, what, remedy))


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
