"""One simulation from one integer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulation import outside
from simulation import store as stores
from simulation.check import Watch
from simulation.clock import Clock, Process
from simulation.cluster import Cluster
from simulation.defects import DEFECTS
from simulation.driver import Simulated
from simulation.faults import Faults
from simulation.group import Setting
from springtide import config as configs
from springtide.config import Config
from springtide.run.folder import open_run
from springtide.run.verify import verify
from springtide.storage import Folder
from springtide.stream import Data, digest, open_data

STEPS = 40
LONGEST_S = 4 * 3600.0
QUIET_S = 1500.0
"""Nothing goes wrong any more after this time: whatever happened, the run must then come to its end."""


@dataclasses.dataclass
class Outcome:
    """What a seed has found."""

    seed: int
    violations: list[str]
    finished: bool
    starts: int
    took_s: float
    faults: list[str]
    digest: str
    """Of its history."""


@functools.cache
def prepared() -> tuple[Config, Data, list[int]]:
    """A tiny dataset, once a process, and the digest of every step's batch."""
    from prepared import prepare

    root = Path(tempfile.mkdtemp(prefix="springtide-simulation-"))
    changes = {
        "shards.root": str(root),
        "run.root": "memory://runs",
        "feed.cache": str(root / "cache"),
        "track.mlflow_uri": "off",
        "track.progress": False,
        "shards.mask_across_documents": False,  # every token counts: verify needs no rows
        "train.total": 12 * 64 * STEPS,
        "checkpoint.every_steps": 6,
        "checkpoint.tries": 3,
        "elastic.min_workers": 1,
        "elastic.max_workers": 4,
    }
    config = prepare(configs.recipes.tiny().override(changes))
    data = open_data(config.data)
    # the same on every machine; nobody opens them: ``open_data`` is replaced
    config = config.override({"shards.root": "/datasets", "shards.dataset": "/datasets/one", "feed.cache": "/cache"})
    digests = [digest(data.order.batch(data.order.step_before(step))) for step in range(1, STEPS + 1)]
    return config, data, digests


def play(seed: int, defect: str | None = None, verbose: bool = False, watched: bool = False) -> Outcome:
    """Play the schedule of ``seed``. ``watched``: look at each built-in function that springtide calls."""
    guard = outside.watched if watched else outside.guarded
    config, data, digests = prepared()
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    logging.getLogger("springtide").setLevel(logging.WARNING if verbose else logging.CRITICAL)
    clock = Clock(seed)
    store = stores.Store(clock)
    stores.install(store)
    draw = clock.random
    config = config.override({"run.id": "run", "elastic.min_workers": draw.choice([1, 1, 2])})
    run = Folder(config.run.root) / config.run.id
    cluster = Cluster(clock, draw.randint(2, 4))
    watch = Watch(clock, store, cluster, run, digests)
    setting = Setting(clock, cluster, config, run, data, digests, draw.choice([1.0, 4.0, 10.0]))
    if draw.random() < 0.5:  # slow copies: a budget that measures nothing is too short for them
        cluster.copies_s = 0.3 * setting.step_s, 0.6 * setting.step_s
    simulated = Simulated(clock, cluster, setting, watch)

    def heard(event: Any) -> None:
        clock.tell(event.kind, event.describe())
        if verbose and event.kind != "step":
            print(f"  {clock.now:.1f} s: {event.describe()}")

    simulated.heard = heard
    faults = Faults(clock, cluster, store, simulated, verbose)
    store.lies = lambda host: host in cluster.machines and cluster.machines[host].lies
    cluster.committed = watch.committed
    watch.can_train = functools.partial(_can_train, simulated, faults, stopped=False)
    watch.can_train_without_stopped = functools.partial(_can_train, simulated, faults, stopped=True)
    watch.lacks_step = functools.partial(_lacks_step, simulated, faults)
    with outside.replaced(clock, seed), guard(watch.say), simulated.patched(), _planted(defect):
        clock.start("watch", "hub", functools.partial(_look, watch))
        late_s = random.Random(seed).choice([0.0, 0.0, 0.0, 150.0])  # longer than snapshot servers wait alone
        operator = clock.start("operator", "hub", functools.partial(_operate, simulated, faults, config, late_s))
        faults.plan(draw.randint(1, 8), QUIET_S)
        ended = clock.run(LONGEST_S, lambda: not operator.alive)
        if not ended:
            watch.say("the run does not come to its end: " + ", ".join(p.name for p in clock.processes if p.alive))
        elif operator.error is not None:
            watch.say(f"operator: {operator.error!r}")
        clock.run(clock.now + 300.0, lambda: False)  # writers and journals that are left
        store.away_until_s = 0.0
        finished = bool(ended and operator.error is None and open_run(run.url).finished)
        if ended and not finished:
            watch.say("the run has not finished")
        watch.at_the_end(finished, verify(run) if finished else None)
        took_s = clock.now
        clock.end()
    return Outcome(seed, watch.violations, finished, watch.starts, took_s, faults.done, clock.digest)


def _operate(simulated: Simulated, faults: Faults, config: Config, late_s: float) -> None:
    """Who starts the driver again when it is gone, as a batch system does."""
    clock = simulated.clock
    for number in range(40):
        driver = faults.driver = simulated.drive(config, f"host{number % 2}", resume="auto")
        while driver.alive:
            clock.sleep(1.0)
        with contextlib.suppress(OSError):  # the store is away: it is started again
            if driver.error is None and driver.result is not None and driver.result.finished:
                return
        faults.note(f"driver {number} ended: {driver.error!r}")
        clock.sleep(clock.random.uniform(5.0, 60.0) + late_s)
    raise RuntimeError("the run does not finish, however often it is started")


def _look(watch: Watch) -> None:
    while True:
        watch.clock.sleep(10.0)
        watch.look()


def _can_train(simulated: Simulated, faults: Faults, stopped: bool) -> bool:
    """Whether all that is needed to train is there; or, if processes are ``stopped`` now, all that is needed without them, on
    nodes that were not stopped lately, and whose workers did not crash: these may be excluded."""
    cluster, now = simulated.cluster, simulated.clock.now
    there = [one for one in cluster.alive if one.leaves_at_s is None and not one.lies]
    frozen = any(one.worker_frozen_until_s > now for one in cluster.alive)
    away = simulated.watch.store.away_until_s > now or cluster.head_away_until_s > now
    runs = faults.driver is not None and faults.driver.alive
    if stopped:
        there = [one for one in there if max(one.last_frozen_s, cluster.crashes_until_s + 400.0) < now - 600.0]
    return runs and not away and frozen == stopped and len(there) >= simulated.setting.config.elastic.max_workers // 2


def _lacks_step(simulated: Simulated, faults: Faults) -> bool:
    """Return True if the newest state is in memory only, though nobody trains, and a driver, the store and all processes are
    there."""
    cluster, now = simulated.cluster, simulated.clock.now
    away = simulated.watch.store.away_until_s > now or cluster.head_away_until_s > now
    frozen = any(one.worker_frozen_until_s > now for one in cluster.alive)
    runs = faults.driver is not None and faults.driver.alive
    return runs and not away and not frozen and simulated.watch.idle_s > 30.0 and simulated.lacks_step()


@contextlib.contextmanager
def _planted(defect: str | None) -> Iterator[None]:
    if defect is None:
        yield
        return
    with DEFECTS[defect]():
        yield


def ended(process: Process) -> bool:
    """Whether a process is over."""
    return not process.alive
