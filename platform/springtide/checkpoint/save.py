"""Write a checkpoint: tensors by all ranks, then the manifest, then the commit marker."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from springtide.checkpoint.layout import COMMITTED, MANIFEST, Meta, checkpoints, committed, name_of
from springtide.store import Folder, digest


def save(
    run: Folder, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Meta, keep_last: int
) -> tuple[str, int]:
    """Save and commit; all ranks call it together. Returns the checkpoint's name and its size in bytes.

    An error leaves what was committed before untouched. Older checkpoints than the newest ``keep_last`` are removed once
    this one is committed.
    """
    name = name_of(meta.step)
    folder = checkpoints(run) / name
    if dist.get_rank() == 0 and name not in committed(run):
        retire(run, name)  # half a checkpoint, left by a killed save, or one that was abandoned
    dist.barrier()
    if name not in committed(run):
        tensors, optim = get_state_dict(model, optimizer)
        dcp.save({"model": tensors, "optim": optim}, storage_writer=_writer(folder))
        _commit(folder, meta)
    size = sum(file["size_bytes"] for file in folder.read_json(MANIFEST)["files"].values())
    if dist.get_rank() == 0:
        for old in committed(run)[:-keep_last]:
            retire(run, old)
    return name, size


def _writer(folder: Folder) -> FileSystemWriter:
    if folder.is_local:
        return FileSystemWriter(folder.path, sync_files=True)
    return FsspecWriter(folder.url, sync_files=False, use_listings_cache=False)


def _commit(folder: Folder, meta: Meta) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [name for name in folder.names() if name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")]
    mine: dict[str, Any] = {}
    for name in names:
        with folder.open(name) as file:
            mine[name] = {"size_bytes": folder.size(name), "digest": digest.of_file(file)}
    everyone: list[dict[str, Any] | None] = [None] * size
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        files = dict(itertools.chain.from_iterable(part.items() for part in everyone if part))
        folder.write_json(MANIFEST, {"meta": meta.model_dump(mode="json"), "files": files})
        folder.write(COMMITTED, meta.config_fingerprint)
    dist.barrier()


def retire(run: Folder, name: str) -> None:
    """Remove a checkpoint, its commit marker first, so that half of one is never taken for a whole."""
    folder = checkpoints(run)
    folder.remove(f"{name}/{COMMITTED}")
    folder.remove(name)
