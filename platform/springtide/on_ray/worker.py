"""What runs in each Ray Train worker: the loop of ``train``, with Ray behind its seams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray.train

from springtide import config as configs
from springtide.checkpoint.load import gathered
from springtide.on_ray.control import Line
from springtide.on_ray.feed import feed
from springtide.on_ray.vault import Vaults
from springtide.parallel import world
from springtide.store import Folder
from springtide.stream import Batch, open_data
from springtide.train import Run


def work(job: dict[str, Any]) -> None:
    """Train as one rank. ``job``: ``config`` (plain data), ``control`` (actor), ``labels`` (for checkpoints),
    ``owner`` (of the run)."""
    config = configs.build(job["config"])
    context = ray.train.get_context()
    here = world("cuda" if config.elastic.gpus_per_worker else "cpu", context.get_local_rank())
    data = open_data(config)
    reader = data.reader(here.rank, here.size)

    def batches(step: int) -> Iterator[Batch]:
        return feed(reader, reader.plan(step, config.num_steps, int(config.feed.read_bytes)), config.feed)

    folder = Folder(config.run.root) / config.run.id
    vaults = None
    if config.checkpoint.memory_every and config.checkpoint.stage:
        vaults = Vaults(config, folder)
        vaults.pair(gathered(vaults.node))
    run = Run(config, here, data, folder, job["labels"], vaults, job["owner"])
    # one rank speaks for all: what it hears reaches the others in the step's own all-reduce
    line = Line(job["control"]) if here.is_first else None
    for event in run.events(batches, line.interrupt if line else lambda: None):
        if line:
            line(event)
    if line:
        line.flush()
