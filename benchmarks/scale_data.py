"""Datasets and journals at size, for benchmarks/scale.py: opened, sought and read by real code, out of files made here."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from typing import Any

import page
from scale_counts import Cost, cost_of

from springtide.config import recipes
from springtide.config.steps import OrderStep
from springtide.storage import Folder

GROUPS, ROWS = 50, 256
"""Row groups for each unit of size, and rows in each: 2,048 units are 100,000 groups, 105 billion tokens of rows of 4,096."""
STEPS = 50
"""Steps of a journal for each unit of size."""
FAR = OrderStep(1_000_000)


def manifest_of(groups: int) -> Any:
    """A dataset with this number of row groups, some of them held out, in shards of 256."""
    from springtide.shards.manifest import HELDOUT, TRAIN, Manifest, Split
    from springtide.shards.shard_table import RowGroup, Shard

    row_bytes, digest = 2 * 257, "0" * 32
    starts = 4, 4 + 8 * ROWS, 4 + 12 * ROWS
    end = starts[2] + ROWS * row_bytes
    group = RowGroup(rows=ROWS, sample_ids=starts[0], num_bytes=starts[1], tokens=starts[2], end=end, digest=digest)

    def split(number: int, what: str) -> Split:
        counts = [256] * (number // 256) + ([number % 256] if number % 256 else [])
        shards = tuple(
            Shard(
                name=f"{what}-{place:05d}.parquet",
                rows=ROWS * count,
                size_bytes=2 * end,
                digest=digest,
                groups=(group,) * count,
            )
            for place, count in enumerate(counts)
        )
        rows = ROWS * number
        return Split(documents=rows, tokens=rows * 256, num_bytes=rows * 1024, rows=rows, shards=shards)

    return Manifest(
        sequence_length=256,
        token_type="uint16",
        vocab_size=1000,
        end_of_text=0,
        begin_of_text=0,
        tokenizer_digest=digest,
        fingerprint="f",
        heldout_fraction=0.01,
        source={},
        sources={"all": {TRAIN: split(groups, "train"), HELDOUT: split(1, "heldout")}},
    )


def config_of(root: str) -> Any:
    """A run's data, of many lanes."""
    stream = {"stream.global_batch": 512, "stream.lanes": 512}
    return recipes.tiny().override(
        {"shards.root": root, "shards.dataset": f"{root}/data", "shards.sequence_length": 256, **stream}
    )


def opened(size: int, rounds: int) -> Cost:
    """A process opens a dataset: each rank, at each start of a group."""
    from springtide.shards.manifest import write_manifest
    from springtide.stream import open_data

    with tempfile.TemporaryDirectory(prefix="springtide-scale-", dir="/dev/shm") as root:
        write_manifest(Folder(root) / "data", manifest_of(GROUPS * size))
        config = config_of(root).data
        return cost_of(lambda: open_data(config), rounds)


def sought(size: int, rounds: int) -> Cost:
    """The first batch of step 1,000,000, for one of 64 ranks, by an order that is new."""
    from springtide.stream import Order

    groups = ((ROWS,) * (GROUPS * size),)
    order = Order(("a",), groups, 0, 512, 512, 512)
    return cost_of(lambda: dataclasses.replace(order).rank_batch(FAR, 3, 64), rounds)


def journal(size: int, rounds: int) -> Cost:
    """A reader reads a journal from its beginning."""
    from springtide.run.folder import open_run
    from springtide.tracking.journal_reader import JournalReader

    with tempfile.TemporaryDirectory(prefix="springtide-scale-", dir="/dev/shm") as root:
        page.written(root, STEPS * size, restarts=10)
        run = open_run(f"{root}/long")
        return cost_of(lambda: JournalReader(run.folder).read(), rounds)


def report(size: int, rounds: int) -> Cost:
    """The page of a run, from what was read."""
    from springtide.run.folder import open_run
    from springtide.run.page_facts import facts_of
    from springtide.run.report.run_page import render
    from springtide.tracking.journal_reader import JournalReader

    with tempfile.TemporaryDirectory(prefix="springtide-scale-", dir="/dev/shm") as root:
        page.written(root, STEPS * size, restarts=10)
        run = open_run(f"{root}/long")
        facts, reader = facts_of(run), JournalReader(run.folder)
        reader.read()
        length = 0

        def again() -> None:
            nonlocal length
            length = len(render(run.id, reader.timeline, facts))

        found = cost_of(again, rounds)
        return found._replace(bytes=length)


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of a line through the logarithms, by least squares; 0 of what does not grow or is nothing.

    >>> round(exponent([8, 64, 512], [16.0, 128.0, 1024.0]), 3)
    1.0
    """
    if min(values) <= 0 or max(values) == min(values):
        return 0.0
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
