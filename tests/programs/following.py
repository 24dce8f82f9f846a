"""Follow a folder, and be killed at a place: ``python following.py SOURCE ROOT PLACE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from prepared import small, write_corpus

from springtide.app.follow import follow
from springtide.config import Config


def config_of(source: Path, root: Path) -> Config:
    return small(root, source, corpus__tokenizer="bytes", corpus__near_duplicates=False)


def arrive(source: Path, name: str, seed: int) -> list[str]:
    """Put a batch of files into the folder; return their names below it."""
    write_corpus(source / name, 30, seed)
    return sorted(f"{name}/{path.name}" for path in (source / name).iterdir())


if __name__ == "__main__":
    SOURCE, ROOT, PLACE = sys.argv[1:]

    def kill(place: str) -> None:
        if place == PLACE:
            os.kill(os.getpid(), signal.SIGKILL)

    list(follow(config_of(Path(SOURCE), Path(ROOT)), once=True, at_least_bytes=1, wait=lambda _: None, listen=kill))
