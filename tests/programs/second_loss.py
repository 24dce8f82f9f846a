"""A run that loses a node, and then another while the next group forms. Prints one line of JSON."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from typing import Any

from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import WorkerGroup

import springtide as st
from springtide import config as configs
from springtide.events import Event, Started, StepDone
from springtide.on_ray.cluster.local import LocalCluster
from springtide.on_ray.cluster.nodes import leftovers
from springtide.on_ray.train import policy
from springtide.on_ray.train.group import Controller

STEPS, LOSES = 30, 5
ROWS, TOKENS = 12, 64


class LoseRank1(WorkerGroupCallback):
    """Kills the node of rank 1 when the second group has its workers, before they set up their process group."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self._groups = cluster, 0
        self.killed_s = 0.0

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        """As Ray calls it."""
        self._groups += 1
        if self._groups == 2:
            self._cluster.kill(worker_group.get_workers()[1].metadata.node_id)
            self.killed_s = time.monotonic()


def main() -> None:
    """Train, and say what was lost."""
    logging.basicConfig(level=logging.ERROR)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        changes = {
            "run.root": root,
            "run.id": "lost-twice",
            "shards.root": f"{root}/datasets",
            "train.total": STEPS * ROWS * TOKENS,
            "train.eval_rows": 0,
            "optim.warmup": 0,
            "elastic.max_workers": 3,
            "checkpoint.memory_every": 1,
            "track.progress": False,
            "track.mlflow_uri": "off",
        }
        config = configs.recipes.tiny().override(changes)
        started = list[tuple[int, float]]()
        lost = list[str]()
        with LocalCluster(3) as cluster:
            second = LoseRank1(cluster)

            class WithLoss(Controller):
                def __init__(self, pool: Any, *, callbacks: list[object], **named: object) -> None:
                    super().__init__(pool, callbacks=[second, *callbacks], **named)

            policy.Controller = WithLoss  # type: ignore[misc]

            def listen(event: Event) -> None:
                if isinstance(event, Started):
                    started.append((event.world_size, time.monotonic()))
                if isinstance(event, StepDone) and event.step == LOSES and not lost:
                    lost.append(cluster.nodes[0])
                    cluster.kill(lost[0])

            run = st.train(config, listen=listen)
            found["ok"] = run.verify().ok and run.finished
            found["world_sizes"] = [size for size, _ in started]
            found["again_s"] = started[-1][1] - second.killed_s
            found["leftovers"] = leftovers()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
