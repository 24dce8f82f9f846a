"""How often nodes fetch a row group from object storage, when two ranks of each read: a real Ray of three raylets, each with a
cache of its own, two of which have two ranks each; and a real S3 server.

65,536 rows of 65 ids in row groups of 64, 16 lanes, four ranks, reads of about three steps. Each rank is an actor on its node,
which reads its plan through the feed and checks each batch against the order. After that a node's cache has one file for each
row group that it has fetched, because nothing is evicted: each was a request to the store.

    node     a read prefers its rank's node, as the feed has it
    spread   a read goes to any node, as Ray Data has it

Then one of the two nodes is drained, as after a preemption notice: its ranks get their batches all the same.

row_groups_fetched: row groups fetched by all nodes over those that a node's own ranks read, summed over the nodes; 1 means once
each. row_groups_vs_spread: fetched over fetched with ``spread``, the median of the rounds.

    python benchmarks/node_reads.py [--quick] [--json] [--rounds 3] [--steps 60]
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import claims
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from stream import write_ours

import springtide as st
from springtide.config.steps import StepsDone
from springtide.ray.cluster.local import LocalCluster
from springtide.ray.data import feed as feeds
from springtide.storage import Folder
from springtide.stream import RankReader, check, open_data
from springtide.stream.chain import corpus_and_row

ROOT = Path(__file__).parent.parent
LENGTH, ROWS, GROUP_ROWS, BATCH = 64, 65_536, 64, 64
NODES, RANKS_A_NODE = 2, 2
RANKS = NODES * RANKS_A_NODE
GOALS = {"row_groups_fetched": 1.0, "row_groups_vs_spread": 0.6}
_PIECE = re.compile("[0-9a-f]{32}")


def config_of(dataset: str) -> st.Config:
    """A run on the rows of this benchmark; the cache is in each node's own temporary folder."""
    return st.recipes.tiny().override(
        {
            "shards.sequence_length": LENGTH,
            "shards.dataset": dataset,
            "shards.rows_per_group": GROUP_ROWS,
            "model.max_sequence_length": LENGTH,
            "stream.global_batch": BATCH,
            "stream.lanes": 16,
            "train.total": "1B",
            "feed.read_bytes": 16384,
            "feed.cache": "",
        }
    )


class Rank:
    """One rank, on its node."""

    def read(self, dataset: str, rank: int, first: int, last: int, spread: bool) -> int:
        """Read and check the batches of some steps; the number of them."""
        config = config_of(dataset)
        reader = RankReader(open_data(config.data), rank, RANKS)
        plan = reader.plan(StepsDone(first), StepsDone(last), int(config.feed.read_bytes))
        count = 0
        prefer = (lambda node: "SPREAD") if spread else feeds.node_affinity
        with mock.patch.object(feeds, "node_affinity", prefer):
            for step, batch in enumerate(feeds.feed(reader, plan, config.feed), start=first):
                check(reader.data.order, rank, RANKS, StepsDone(step), batch)
                count += 1
        return count


def needed(dataset: str, last: int) -> int:
    """Row groups that the ranks of each node read in the first steps, summed over the nodes."""
    order = open_data(config_of(dataset).data).order
    found = 0
    for first in range(0, RANKS, RANKS_A_NODE):
        ranks = range(first, first + RANKS_A_NODE)
        ids = [
            order.rank_batch(order.step_after(StepsDone(step)), rank, RANKS) for step in range(last) for rank in ranks
        ]
        found += len(np.unique(corpus_and_row(np.concatenate(ids))[1] // GROUP_ROWS))
    return found


def fetched(folders: list[Path]) -> list[int]:
    """Files that each node has fetched from the store, without the dataset's index of row groups; they are removed."""
    found = []
    for folder in folders:
        pieces = [file for file in folder.glob("springtide-cache-*/*") if _PIECE.fullmatch(file.name)]
        found.append(max(0, len(pieces) - 1))
        for piece in pieces:
            piece.unlink()
    return found


def measure(rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """All rounds on one cluster, and the reads of a drained node."""
    url, sources = "s3://shards/rows", np.random.default_rng(0).integers(0, 250, (ROWS, LENGTH + 1)).astype(np.uint16)
    write_ours(sources, str(folder / "rows"), config_of("").shards)
    homes = [folder / name for name in ("head", *(f"node-{number}" for number in range(NODES)))]
    for home in homes:
        home.mkdir()
    table = []
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with mock.patch.dict(os.environ, TMPDIR=str(homes[0]), PYTHONPATH=path), LocalCluster(0, patience=60) as cluster:
        for home in homes[1:]:
            with mock.patch.dict(os.environ, TMPDIR=str(home)):
                cluster.add()
        ranks = [
            ray.remote(Rank)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in cluster.nodes
            for _ in range(RANKS_A_NODE)
        ]

        def all_read(dataset: str, first: int, last: int, spread: bool = False) -> None:
            calls = [one.read.remote(dataset, rank, first, last, spread) for rank, one in enumerate(ranks)]
            assert ray.get(calls) == [last - first] * RANKS

        for number in range(rounds):
            row = {}
            for how in ("node", "spread")[:: 1 if number % 2 else -1]:
                dataset = f"{url}-{number}-{how}"  # processes keep open what they have read
                Folder(url).fs.put(f"{folder}/rows/", f"shards/rows-{number}-{how}/", recursive=True)
                all_read(dataset, 0, steps, how == "spread")
                row[how] = fetched(homes)
            row["needed"] = needed(dataset, steps)
            table.append(row)
            print(f"round {number + 1}: {row}", flush=True)
        cluster.drain(cluster.nodes[0], 600.0)
        all_read(dataset, steps, 2 * steps)
        asked = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        print(f"after the drain of a node its ranks read {steps} more steps; named actors: {sorted(asked)}", flush=True)
    return {"rounds": table}


def main() -> None:
    """Print the table and the claims."""
    options = claims.options(__doc__, rounds=3, steps=(60, 12))
    sys.path.append(str(ROOT / "tests" / "programs"))
    import s3_server

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        with s3_server.serve(folder / "s3"):
            found = measure(int(options.rounds), int(options.steps), folder)
    table = found["rounds"]
    once = statistics.median(sum(row["node"]) / row["needed"] for row in table)
    against = statistics.median(sum(row["node"]) / sum(row["spread"]) for row in table)
    values = dict(zip(GOALS, (once, against), strict=True))
    claims.show(options, [claims.claim(name, values[name], goal, "lower", found) for name, goal in GOALS.items()])


if __name__ == "__main__":
    main()
