"""Read a checkpoint back, at any world size: the newest whose bytes are those that were committed."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from springtide.checkpoint.layout import Identity, Meta, checkpoints, committed, of_another_order, read_manifest
from springtide.errors import CheckpointError
from springtide.store import Folder, digest

_log = logging.getLogger(__name__)


def restore(run: Folder, model: nn.Module, optimizer: torch.optim.Optimizer, identity: Identity) -> Meta | None:
    """Load the newest good checkpoint into ``model`` and ``optimizer``; all ranks call it together. None without one.

    CheckpointError when there are checkpoints and none is good, or when its steps are none of this run's order.
    """
    choice: list[str | None] = [_newest_good(run) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice)
    name = choice[0]
    if name is None:
        return None
    if name.startswith("!"):
        raise CheckpointError(name[1:])
    meta = Meta.model_validate(read_manifest(run, name)["meta"])
    other = of_another_order(run, meta, identity)
    if other:
        raise CheckpointError(other)
    load_tensors(run, name, model, optimizer)
    return meta


def load_tensors(run: Folder, name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load the tensors of checkpoint ``name`` in place, whatever world size wrote it."""
    folder = checkpoints(run) / name
    reader = FileSystemReader(folder.path) if folder.is_local else FsspecReader(folder.url, use_listings_cache=False)
    if optimizer is None:
        state = {"model": model.state_dict()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what we want
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        model.load_state_dict(state["model"])
        return
    tensors, optim = get_state_dict(model, optimizer)
    state = {"model": tensors, "optim": optim}
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def problem(run: Folder, name: str) -> str:
    """Why a committed checkpoint cannot be used: the file, what was expected and what was found; empty when it is good."""
    folder = checkpoints(run) / name
    try:
        for file, expected in read_manifest(run, name)["files"].items():
            with folder.open(file) as stream:
                found = digest.of_file(stream)
            if found != expected["digest"]:
                return f"{file}: digest expected {expected['digest']}, found {found}"
    except (OSError, ValueError, KeyError) as error:
        return str(error)
    return ""


def _newest_good(run: Folder) -> str | None:
    names = committed(run)
    problems = []
    for name in reversed(names):
        why = problem(run, name)
        if not why:
            return name
        _log.warning("checkpoint %s is passed over: %s", name, why)
        problems.append(f"{name}: {why}")
    if problems:
        return "!none of the checkpoints of " + run.url + " can be used: " + "; ".join(problems)
    return None
