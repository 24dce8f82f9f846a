"""Compilation of blocks, of FlexAttention and of the head's loss, with a separate graph for each input shape. Only this file
uses Dynamo (torch's graph capture)."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import stat
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.model.flex import FlexKernel
from springtide.model.loss import PartLoss, part_loss

_log = logging.getLogger(__name__)
_RECOMPILES = 64
"""Largest number of compiled graphs of a block. A process needs two graphs per micro-batch size: with gradients and without.
The micro-batch size may change with the world size."""
_ALL_RECOMPILES = 1024
_HALF = ("bf16", "fp16")
_FLEX_WIDTHS = 16, 256
"""Smallest and largest head width for FlexAttention."""
_AMPERE = (8, 0)
_LIMIT_HIT = "recompile limit"
_OTHERS_WRITE, _OTHERS_PASS = stat.S_IWGRP | stat.S_IWOTH, stat.S_IXGRP | stat.S_IXOTH


def compile_block(block: nn.Module) -> None:
    """Compile ``block`` in place at its first call, with a static graph for each input shape. By default torch would compile a
    second shape into a graph of dynamic sizes, with slower kernels. Raises the ConfigError of ``check_cache``."""
    check_cache()
    _raise_limits()
    block.compile(dynamic=False)


def _raise_limits() -> None:
    settings: Any = torch._dynamo.config
    for name, least in {"recompile_limit": _RECOMPILES, "accumulated_recompile_limit": _ALL_RECOMPILES}.items():
        if hasattr(settings, name):  # a private setting of Dynamo, which may be renamed
            setattr(settings, name, max(getattr(settings, name), least))


def takes_flex(config: ModelConfig, precision: str) -> bool:
    """Return True if FlexAttention's GPU kernels support a model's attention. They need a half-precision type, and heads whose
    width is within ``_FLEX_WIDTHS``.

    Args:
        config: the model's config.
        precision: the precision of computation, ``parallel.computes_in``.
    """
    least, most = _FLEX_WIDTHS
    return precision in _HALF and least <= config.head_width <= most


def flex_kernel(config: ModelConfig, precision: str, device: torch.device) -> FlexKernel | None:
    """Return compiled FlexAttention if it runs on ``device``. Returns None where attention must use dense masks instead: on
    CPUs, on GPUs older than Ampere, in full precision, and without a compiler. Raises the ConfigError of ``check_cache``.

    Args:
        config: the model's config.
        precision: the precision of computation, ``parallel.computes_in``.
        device: this process's device.
    """
    if device.type != "cuda" or not takes_flex(config, precision):
        return None
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    if lacking := [what for what, is_there in _compilers().items() if not is_there]:
        _log.warning(
            "attention uses a dense mask to separate documents, several times slower than FlexAttention: this node lacks %s",
            " and ".join(lacking),
        )
        return None
    return compiled_flex()


def compiled_flex() -> FlexKernel:
    """Return FlexAttention, which is compiled at its first call with each shape. Inside a compiled block it becomes a part of
    the block's graph. It never falls back to eager execution, which would materialize the full score matrix."""
    check_cache()
    _raise_limits()
    kernel: FlexKernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return kernel


def compiled_loss() -> PartLoss:
    """Return a compiled ``part_loss``, the function that computes the loss of a slice of a batch's tokens. It is compiled at
    its first call with each shape. All slices of a batch have the same shape, except perhaps the last."""
    check_cache()
    _raise_limits()
    fused: PartLoss = torch.compile(part_loss, dynamic=False, fullgraph=True)
    return fused


def _compilers() -> dict[str, bool]:
    """Return the tools that compile FlexAttention, and whether each is installed. Triton builds its launchers with a C
    compiler."""
    return {
        "Triton": importlib.util.find_spec("triton") is not None,
        "a C compiler": any(map(shutil.which, ("gcc", "clang", "cc"))),
    }


def compiled_folder() -> str:
    """Return the path of this node's folder of compiled code. Creates the folder if it does not exist. Raises the ConfigError
    of ``check_cache``."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # import only when needed: it takes a second

    check_cache()
    return cache_dir()


def num_compiled() -> int:
    """Return the number of graphs that this process has compiled so far."""
    counted: Any = getattr(getattr(torch._dynamo, "utils", None), "counters", {}).get("stats", {})
    return int(counted.get("unique_graphs", 0))


def compiled_artifacts() -> bytes | None:
    """Return the code that this process has compiled, for ``load_compiled``; None if there is none. May be called from any
    thread."""
    lock = getattr(getattr(torch._dynamo, "convert_frame", None), "compile_lock", contextlib.nullcontext())
    # wait until no other thread compiles: a compilation would change torch's list of artifacts while it is read here
    with lock:
        found = torch.compiler.save_cache_artifacts()
    return found[0] if found else None


def load_compiled(artifacts: bytes) -> bool:
    """Put ``artifacts`` (code that another process compiled) into this node's folder of compiled code. Returns True if there
    were any artifacts. torch executes them, so they must come from this user."""
    check_cache()
    found = torch.compiler.load_cache_artifacts(artifacts)
    return found is not None and not found.empty()


def check_cache() -> None:
    """Raise ConfigError if other users own, or can write to, the folder from which torch loads compiled code. By default the
    folder has a predictable name in /tmp, and torch executes the code that it finds there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # import only when needed: it takes a second

    folder = cache_dir()  # creates the folder if needed, with this user's umask
    found = os.stat(folder)
    # check the owner of the folder; if the folder is a link, also the owner of the link
    owners = {found.st_uid, os.lstat(folder).st_uid}
    if owners != {os.getuid()}:
        _refuse(f"{folder}, which belongs to user {', '.join(map(str, sorted(owners)))}")
    # a new folder, made with umask 0002, is writable for the user's group
    if found.st_mode & _OTHERS_WRITE and not os.listdir(folder):
        os.chmod(folder, 0o700)
    found = os.stat(folder)  # read the mode again: another process of this user may have changed it
    if found.st_mode & _OTHERS_WRITE:
        _refuse(f"{folder}, which can be written by others ({stat.filemode(found.st_mode)})")
    if strange := _of_others(folder, is_private=not found.st_mode & _OTHERS_PASS):
        _refuse(f"{folder}, where {strange} belongs to another user or can be written by others")


def _refuse(folder: str) -> None:
    problem = f"torch would run compiled code from {folder}"
    remedy = "remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    raise ConfigError(explain("parallel.compile", True, problem, remedy))


@functools.cache
def _of_others(folder: str, is_private: bool) -> str:
    """Return the first path below ``folder`` that belongs to another user or that other users may write to. The path is
    relative to ``folder``; empty if there is none. ``is_private``: True if other users cannot enter the folder. The result is
    cached, because there may be thousands of paths."""
    for above, folders, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # another process has replaced the file meanwhile
                found = os.lstat(path)
                is_open = found.st_mode & _OTHERS_WRITE and not (is_private or stat.S_ISLNK(found.st_mode))
                if is_open or found.st_uid != os.getuid():
                    return os.path.relpath(path, folder)
    return ""


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which compiled blocks run eagerly."""
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else contextlib.nullcontext()


def gave_up() -> str:
    """Return the reason why blocks run eagerly in this process although the config asks for compiled blocks; empty if they run
    compiled."""
    counted: Any = getattr(getattr(torch._dynamo, "utils", None), "counters", {}).get("unimplemented", {})
    if not any(_LIMIT_HIT in reason for reason in counted):
        return ""
    return (
        "Dynamo hit its recompile limit: blocks met too many shapes, and new shapes run without parallel.compile from now on "
        "(TORCH_LOGS=recompiles shows why)"
    )
