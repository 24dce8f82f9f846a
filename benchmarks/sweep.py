"""A sweep that shares its workers, beside bare Ray Tune with trials of a fixed size: worker-seconds, work lost, starts.

All three try the same points on the same rows with the same first weights, evaluate on the same held-out rows at the same
rungs, save there too, and run on the same kind of cluster: a head that stays, and nodes of one worker each.

    springtide   springtide.api.sweep.sweep: ASHA, one elastic pool
    fixed_asha   bare Ray Tune's ASHA over bare Ray Train, ``--size`` workers a trial (sweep_peers.py)
    random       the same, every trial to its end

``race``: worker-seconds of a whole sweep that finds the same loss: what random search has found, within 0.01 nats. Nobody knows
that loss beforehand, so sweeps are paid to their end; what had been paid when a trial first had it (``until_held_s``) is luck,
for most of it is the place of the best point among the others. A sweep of ours that does not find it has lost. Held are the
slots that Ray accounts to somebody, asked five times a second: with start-up, with teardown, with processes that wait for work.
``cluster_s`` has the idle slots too. Each round has points of its own. A trial's start is from when Tune asks for its point
until its first step is done, the median over trials, ours beside fixed_asha's. Both ASHAs let a fourth go on, Tune's default.

``trace``: both sweeps with ASHA to their end while a record of spot capacity is replayed, its times squeezed to ``--gap``
seconds a change: nodes join, or are announced to go and go 12 s later. Work lost is tokens of steps that a trial has made
before, by all that were made. (Steps that a killed worker of ours had no time to tell are in neither; the peer's are.)

    python benchmarks/sweep.py [--traces FOLDER] [--only race|trace] [--quick] [--json] [--rounds 2] [--trials 24] [--steps 160]
        [--first 0: number of the first round] [--slots 2] [--size 1] [--changes 8] [--gap 15]
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import claims
from sweep_work import (
    OURS,
    REDUCTION,
    RUNGS,
    Made,
    Seen,
    Work,
    config_of,
    losses,
    seconds,
    slots,
    starts,
    step_s,
    steps_made,
    work_of,
)

from springtide.elastic.traces import smaller
from springtide.planning.simulation import read_trace

TOLERANCE = 0.01
"""Nats; who trains with one worker and who with two differ in the last bits, and so in what becomes of them."""
NOTICE_S = 12.0
LONGEST_S = 600.0
"""Of one sweep."""
TRACE = "bamboo/traces/g4dn-trace.csv"
TRACE_NODES = 3
GOALS = {"random": 0.35, "fixed_asha": 0.7}
LOST, START = 0.02, 1.0
RAYS_OWN = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2.0"}
"""What springtide sets otherwise."""


def springtide(work: Work) -> None:
    """Ours."""
    from springtide.api.sweep import sweep

    at_once = work.config.elastic.max_workers  # as the peer: a cluster that grows is not to be counted when it is small
    sweep(work.config, work.table, name="sweep", seed=work.seed, concurrent=at_once, say=_say)


def _peer(work: Work, asha: bool) -> None:
    import ray
    from sweep_peers import sweep

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    sweep(
        {**work.told, "folder": work.folder},
        work.points,
        work.config.elastic.max_workers,
        RUNGS,
        REDUCTION if asha else 0,
    )


def fixed_asha(work: Work) -> None:
    """Bare Tune with ASHA."""
    _peer(work, asha=True)


def random(work: Work) -> None:
    """Bare Tune without."""
    _peer(work, asha=False)


class Raced(NamedTuple):
    """A sweep that has ended."""

    begin_s: float
    end_s: float
    losses: list[tuple[float, str, float]]
    made: list[Made]
    seen: Seen
    starts: dict[str, float]


CLIENTS: dict[str, Callable[[Work], None]] = {"springtide": springtide, "fixed_asha": fixed_asha, "random": random}


def race(client: str, work: Work) -> dict[str, Any]:
    """Sweep to the end; in a process of its own."""
    begin = time.time()
    with _sweeping(client, work, work.config.elastic.max_workers) as (_, driver), slots() as seen:
        driver.join(LONGEST_S)
        end = time.time()  # before the cluster is taken down
        if driver.is_alive():
            raise RuntimeError(f"the sweep of {client} has not ended after {LONGEST_S:.0f} s")
    made = steps_made(client, work)
    return {"raced": Raced(begin, end, losses(client, work), made, seen, starts(client, work, made))}


def judged(raced: Raced, target: float) -> dict[str, float]:
    """What it took, and whether it found the target."""
    there = [time_s for time_s, _, loss in raced.losses if loss <= target]
    held, total = seconds(raced.seen, raced.begin_s, raced.end_s)
    return {
        "held_s": held,
        "cluster_s": total,
        "wall_s": raced.end_s - raced.begin_s,
        "found": float(bool(there)),
        "best": min(loss for _, _, loss in raced.losses),
        "until_held_s": seconds(raced.seen, raced.begin_s, there[0])[0] if there else math.nan,
        "steps": float(len(raced.made)),
        "step_s": step_s(raced.made),
        "trials": float(len({one.trial for one in raced.made})),
        **raced.starts,
    }


def traced(client: str, work: Work, acts: list[tuple[float, int]], nodes: int) -> dict[str, float]:
    """Sweep to the end while nodes come and go: (seconds, by how many) each; in a process of its own."""
    begin = end = time.time()
    played, doomed = 0, dict[str, threading.Timer]()
    with _sweeping(client, work, nodes) as (cluster, driver), slots() as seen:
        while not steps_made(client, work) and driver.is_alive():
            time.sleep(0.5)
        since = time.time()
        while driver.is_alive() and time.time() < begin + LONGEST_S:
            while played < len(acts) and time.time() > since + acts[played][0]:
                for _ in range(abs(acts[played][1])):
                    _say(f"  {time.time() - begin:5.1f} s: {_act(cluster, acts[played][1] > 0, doomed)}")
                played += 1
            time.sleep(0.5)
        end, finished = time.time(), not driver.is_alive()
        for timer in doomed.values():
            timer.cancel()
            timer.join()
    made = steps_made(client, work)
    distinct = len({(one.trial, one.step) for one in made})
    held, total = seconds(seen, begin, end)
    return {
        "lost": (len(made) - distinct) / len(made) if made else float("nan"),
        "steps": float(len(made)),
        "steps_again": float(len(made) - distinct),
        "changes": float(played),
        "finished": float(finished),
        "held_s": held,
        "cluster_s": total,
        "wall_s": end - begin,
        "steps_per_held_s": distinct / held,
    }


def _act(cluster: Any, joins: bool, doomed: dict[str, threading.Timer]) -> str:
    if joins:
        return f"node {cluster.add(wait=False)[:8]} joins"
    node = next(node for node in cluster.nodes if node not in doomed)
    cluster.drain(node, NOTICE_S)
    doomed[node] = threading.Timer(NOTICE_S, cluster.kill, (node,))
    doomed[node].start()
    return f"node {node[:8]} will go in {NOTICE_S:.0f} s"


@contextlib.contextmanager
def _sweeping(client: str, work: Work, nodes: int) -> Iterator[tuple[Any, mp.process.BaseProcess]]:
    """A cluster of so many nodes, and the sweep's driver on it, a process of its own. It is killed before the cluster ends:
    Tune would look for another cluster then, and there may be one on this machine that is not ours."""
    if client != OURS:
        os.environ.update(RAYS_OWN)
    import ray

    from springtide.ray.cluster.local import LocalCluster

    with LocalCluster(nodes, patience=20, dashboard=True) as cluster:
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        driver = mp.get_context("spawn").Process(target=CLIENTS[client], args=(work,))
        driver.start()
        try:
            yield cluster, driver
        finally:
            driver.kill()
            driver.join()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_race(root: str, options: Any) -> list[dict[str, dict[str, float]]]:
    """Each client in each round, in turn another one first."""
    config = config_of(root, int(options.steps), int(options.slots))
    found = []
    for number in range(int(options.first), int(options.first) + options.rounds):
        work = work_of(config, int(options.trials), number, int(options.size), root)
        names, raced = list(CLIENTS), dict[str, Raced]()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            raced[name] = claims.alone(race, name, _own(work, f"{root}/race-{number}-{name}"))["raced"]
            _say(f"round {number + 1}, {name}: {raced[name].end_s - raced[name].begin_s:.0f} s")
        target = TOLERANCE + min(loss for _, _, loss in raced[names[-1]].losses)
        row = {name: judged(one, target) for name, one in raced.items()}
        _say(f"round {number + 1}: target {target:.4f}")
        for name in names:
            _say(f"  {name}: {_words(row[name])}")
        for name in GOALS:
            _say(f"  held, ours by {name}: {row['springtide']['held_s'] / row[name]['held_s']:.2f}")
        found.append(row)
    return found


def judge_race(found: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """The claims: of sums over the rounds, and of medians for a start."""
    claimed = []
    for name, goal in GOALS.items():
        ours, theirs = (sum(row[client]["held_s"] for row in found) for client in ("springtide", name))
        ratio = ours / theirs if all(row["springtide"]["found"] for row in found) else math.inf
        claimed.append(claims.claim(f"worker_seconds_vs_{name}", ratio, goal, "lower", found))
    ratios = [row["springtide"]["start_s"] / row["fixed_asha"]["start_s"] for row in found]
    return [*claimed, claims.claim("trial_start_vs_bare_tune", statistics.median(ratios), START, "lower", ratios)]


def measure_trace(root: str, options: Any) -> dict[str, dict[str, float]]:
    """Ours and bare Tune, on the same changes."""
    numbers = smaller(read_trace(str(Path(options.traces, TRACE))), TRACE_NODES)[: int(options.changes) + 1]
    begin_s, end_s = numbers[0][0], numbers[-1][0]
    squeeze = options.gap * (len(numbers) - 1) / (end_s - begin_s)
    pairs = itertools.pairwise(numbers)
    acts = [((time_s - begin_s) * squeeze, after - before) for (_, before), (time_s, after) in pairs]
    _say(f"trace: {numbers[0][1]} nodes, then {', '.join(f'{change:+d} at {at_s:.0f} s' for at_s, change in acts)}")
    config = config_of(root, int(options.steps), TRACE_NODES)
    work, found = work_of(config, int(options.trials), 0, int(options.size), root), {}
    for name in ("springtide",) if options.quick else ("springtide", "fixed_asha"):
        found[name] = claims.alone(traced, name, _own(work, f"{root}/trace-{name}"), acts, numbers[0][1])
        _say(f"  {name}: {_words(found[name])}")
    return found


def _own(work: Work, folder: str) -> Work:
    return work._replace(config=work.config.override({"run.root": folder}), folder=folder)


def _words(row: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row.items())


def main() -> None:
    """Measure, print, judge."""
    numbers = {
        "trials": (24, 2),
        "steps": (160, 8),
        "first": (0, 0),
        "slots": (2, 2),
        "size": (1, 1),
        "changes": (8, 2),
        "gap": (15, 5),
    }
    options = claims.options(__doc__, rounds=2, text="traces only", **numbers)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if options.quick:  # a sweep takes half a minute, however small
        del CLIENTS["random"], GOALS["random"]
    claimed = []
    with tempfile.TemporaryDirectory() as root:
        if options.only != "trace":
            claimed += judge_race(measure_race(root, options))
        if options.only != "race" and options.traces:
            found = measure_trace(root, options)
            claimed.append(claims.claim("preempted_work_lost", found["springtide"]["lost"], LOST, "lower", found))
        elif options.only != "race":
            _say("the trace is left out: --traces names the folder of the records")
    claims.show(options, claimed)


if __name__ == "__main__":
    main()
