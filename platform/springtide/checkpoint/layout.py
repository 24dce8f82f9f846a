"""Where checkpoints lie and which of them count.

<run>/checkpoints/step-0000000050/   files of torch.distributed.checkpoint
                                     manifest.json   every file's size and digest, and what the state is
                                     COMMITTED       written last: without it there is no checkpoint
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

from springtide.store import Folder

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
_NAME = re.compile(r"step-(\d{10})")


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
    """Names of the committed checkpoints, oldest first."""
    folder = checkpoints(run)
    return [name for name in folder.names() if _NAME.fullmatch(name) and folder.exists(f"{name}/{COMMITTED}")]


def read_manifest(run: Folder, name: str) -> dict[str, Any]:
    """``{"meta": ..., "files": {name: {"size_bytes", "digest"}}}`` of a committed checkpoint."""
    return dict(checkpoints(run).read_json(f"{name}/{MANIFEST}"))
