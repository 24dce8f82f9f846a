"""What ranks run in fp8, on processors that have none: numbers are rounded to it and multiplied in fp32."""

from __future__ import annotations

from loops import train_laid_out

from springtide.config import Config
from springtide.distributed import World
from springtide.distributed.float8 import emulated
from springtide.events import Event


def train_in_fp8(world: World, config: Config, stop_at: int = 0) -> list[Event]:
    """Train in the layout of the config, as ``train_laid_out`` does."""
    with emulated():
        return train_laid_out(world, config, stop_at)
