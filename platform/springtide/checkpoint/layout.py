"""Where checkpoints lie and which of them count.

<run>/checkpoints/step-0000000050/   files of torch.distributed.checkpoint
                                     manifest.json   every file's size and digest, and what the state is
                                     COMMITTED       written last: without it there is no checkpoint
                                     ABANDONED       written when the run went on from an older one in another order
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from springtide.errors import CheckpointError
from springtide.store import Folder

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
ABANDONED = "ABANDONED"
_NAME = re.compile(r"step-(\d{10})")


Identity = Callable[[int], str]
"""Steps done -> the identity of the order that they were trained in."""


class Meta(BaseModel):
    """The part of a run's state that is not tensors, and where it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Steps done; the next one is trained on after a restore."""
    tokens: int
    world_size: int
    order_identity: str
    config_fingerprint: str
    labels: dict[str, str] = {}


def name_of(step: int) -> str:
    """The folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:010d}"


def checkpoints(run: Folder) -> Folder:
    """The folder that holds a run's checkpoints."""
    return run / "checkpoints"


def committed(run: Folder) -> list[str]:
    """Names of the committed checkpoints that are not abandoned, oldest first."""
    folder = checkpoints(run)
    names = [name for name in folder.names() if _NAME.fullmatch(name) and folder.exists(f"{name}/{COMMITTED}")]
    return [name for name in names if not folder.exists(f"{name}/{ABANDONED}")]


def of_another_order(run: Folder, meta: Meta, identity: Identity) -> str:
    """Why a checkpoint is none of this run's order; empty when it is."""
    wanted = identity(meta.step)
    if meta.order_identity == wanted:
        return ""
    return (
        f"checkpoint {name_of(meta.step)} of {run.url} was trained in the order {meta.order_identity}, this run's is "
        f"{wanted}: another dataset, seed, batch, lanes or window, or other weights or skips of steps that are done; "
        "use those it was trained with, or a new run.id"
    )


def check_order(run: Folder, identity: Identity, go_back: bool) -> None:
    """CheckpointError when the newest checkpoint is none of this run's order. With ``go_back`` the run goes on from the
    newest that is, and those after it are marked as abandoned, which loses no byte of them."""
    for name in reversed(committed(run)):
        problem = of_another_order(run, Meta.model_validate(read_manifest(run, name)["meta"]), identity)
        if not problem:
            return
        if not go_back:
            raise CheckpointError(
                f"{problem}, or say --accept-changes to go on from the newest checkpoint of this order"
            )
        checkpoints(run).write(f"{name}/{ABANDONED}", identity(0).encode())


def read_manifest(run: Folder, name: str) -> dict[str, Any]:
    """``{"meta": ..., "files": {name: {"size_bytes", "digest"}}}`` of a committed checkpoint."""
    return dict(checkpoints(run).read_json(f"{name}/{MANIFEST}"))
