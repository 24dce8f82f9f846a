"""One fault at each fault point of a run that trains on a local cluster, one after the other.

    case         restore-before x kill
      trigger    the group is asked to leave, or two nodes join the last one: the next group forms
      the point  is reached; its process waits
      the fault  kill -9 of its node | a notice, and the loss | the store away for a while
                 SIGSTOP of its node for a while | SIGSTOP of its worker for good
      go on      until three steps are done, and every node copies snapshots to a peer again

A fault at a point of the controller, which is in this process, hits another node of the group. ``store`` makes every access to
the run's folder fail with an OSError, as a mount that is stale does: the folder is a link, which points to itself meanwhile.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fault_points.cases import (
    PROMISED,
    Case,
    CaseResult,
    CrossingResult,
    Fault,
    cases_of,
    longest_gap_s,
    steps_lost,
)
from fault_points.cluster import FaultCluster
from fault_points.watch import Reached, name_of, watch
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.events import Event, Started, StepDone
from springtide.faults import Point
from springtide.planning.scenarios import Scenario, config_of
from springtide.run.folder import Run

Say = Callable[[str], None]

_NODES = 3
_SAVE_EVERY = 20
_FAULT_S = 5.0
"""How long a node is stopped, or the store away [s]. Ray gives a node up after less."""
_NOTICE_S = 8.0
"""Time between a notice and the loss [s]."""
_PATIENCE_S = 120.0
"""How long training may take to go on [s]; a group that waits for a lost worker would take longer."""
_STEPS_AFTER = 3
_END_S = 30.0
_WHILE_TRAINING: tuple[Point, ...] = ("replicate", "commit")
"""Points that a group passes while it trains; the others are passed when a group ends or forms."""


def cross(say: Say, only: str = "", keep: str = "") -> CrossingResult:
    """Train on a local cluster, and inject one fault after the other, each at a fault point. Takes about ten seconds a case.

    Args:
        say: receives each event as a line of text, as it happens.
        only: part of the names of the cases, see ``cases_of``; if empty, all of them.
        keep: folder in which the runs stay; if empty, they are removed.

    Returns:
        What each fault cost.

    Raises:
        ConfigError: no case has such a name.
    """
    from springtide.api.prepare import prepare
    from springtide.ray.cluster.nodes import leftovers

    cases, root = cases_of(only), keep or tempfile.mkdtemp(prefix="springtide-points-")
    begin_s = time.time()
    try:
        with _Store(Path(root)) as store, FaultCluster(_NODES) as cluster:
            config = prepare(_config(root, store))
            director = _Director(config, cluster, store, lambda text: say(f"{time.time() - begin_s:6.1f} s  {text}"))
            with watch(director.hold):
                results = tuple(director.play(case) for case in cases)
                verified = director.end()
            return CrossingResult(results, tuple(sorted(director.passed)), verified, leftovers())
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def _config(root: str, store: _Store) -> Config:
    base = config_of(Scenario(_NODES, (), 100_000, ""), root)  # it is asked to stop long before
    return base.override({"run.root": str(store.path / "runs"), "checkpoint.every_steps": _SAVE_EVERY})


class _Store:
    """A folder that can be away: every access to it fails meanwhile, but for files that are open."""

    def __init__(self, root: Path) -> None:
        self.path, self._disk = root / "store", root / "disk"

    def __enter__(self) -> _Store:
        self._disk.mkdir(parents=True, exist_ok=True)
        self.set(away=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self.set(away=False)

    def set(self, away: bool) -> None:
        """Take the folder away, or bring it back."""
        beside = self.path.with_suffix(".new")
        # a link to itself is ELOOP: an OSError of no kind of its own, as of a mount that does not answer
        beside.symlink_to(self.path if away else self._disk)
        os.replace(beside, self.path)


class _Training:
    """A run that trains in a thread, and what it has told so far."""

    def __init__(self, config: Config, on_event: Callable[[Event | None], None]) -> None:
        """``on_event`` receives each event, and None when the run is over."""
        from springtide.api.train import train
        from springtide.ray.train.worker_lender import WorkerLender

        self.lender = WorkerLender()
        self.events: list[Event] = []
        self.error = ""
        self.run: Run | None = None

        def listen(event: Event) -> None:
            self.events.append(event)
            on_event(event)

        def fit() -> None:
            try:
                self.run = train(config, listen=listen, workers=self.lender)
            except BaseException as error:
                self.error = f"{type(error).__name__}: {error}"[:300]
            finally:
                self._over = True
                on_event(None)

        self._over = False
        self._thread = threading.Thread(target=fit, name="springtide-points-run", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._over

    @property
    def group(self) -> list[str]:
        """The nodes of the newest group that trained."""
        return next((list(one.nodes) for one in reversed(self.events) if isinstance(one, Started)), [])

    @property
    def trains(self) -> bool:
        """Whether the newest group has done a step."""
        return self.steps_since(0.0) > 0

    def steps_since(self, since_s: float) -> int:
        """Return the number of steps that the newest group has done since then."""
        newest = itertools.takewhile(lambda one: not isinstance(one, Started), reversed(self.events))
        return sum(isinstance(one, StepDone) and one.time_s > since_s for one in newest)

    def end(self, by_force: bool = False) -> None:
        """Stop the run, and wait until it is over."""
        if by_force:
            self.lender.processes.close()
        else:
            self.lender.ask(GroupRequest.STOP)
        self._thread.join(_END_S if by_force else _PATIENCE_S)
        self.lender.end()


class _Director:
    """Plays the cases, in the thread that owns the cluster: its servers end with the thread that started them."""

    def __init__(self, config: Config, cluster: FaultCluster, store: _Store, say: Say) -> None:
        self._config, self._cluster, self._store, self._say = config, cluster, store, say
        self._news = threading.Condition()
        self._training: _Training | None = None
        self._runs = 0
        self.passed = set[str]()
        """Names of the points that were passed."""
        self._awaited = ""
        """Name of the point at which the next process is held."""
        self._reached: Reached | None = None
        self._go = threading.Event()
        self._copied = set[str]()
        """Nodes whose snapshots were copied to a peer since the fault was over."""

    def hold(self, reached: Reached) -> None:
        """Hold a process at the point that a case awaits; other points are passed."""
        node = self._cluster.node_of(reached.pid) if reached.name == "replicate-after" else ""
        with self._news:
            self.passed.add(reached.name)
            self._copied.add(node)
            is_mine = reached.name == self._awaited
            if is_mine:
                self._awaited, self._reached = "", reached
            self._news.notify_all()
        if is_mine:
            self._go.wait()

    def play(self, case: Case) -> CaseResult:
        """Play one case."""
        self._say(case.name)
        where, problem, first, begin_s = "", "", 0, time.time()
        try:
            training = self._ready(case)
            first, begin_s = len(training.events), time.time()
            where = self._strike(case, training)
            self._go_on(training)
        except _NotHeld as error:
            problem = str(error)
        assert self._training is not None
        events = self._training.events
        lost, gap_s = steps_lost(events, first), longest_gap_s(events[first:], begin_s, time.time())
        if problem and not self._training.is_over:  # it hangs: the next case is not to pay for this one
            self._training.end(by_force=True)
        elif lost > PROMISED[case.fault]:
            problem = f"may cost {PROMISED[case.fault]} steps"
        remark = ": ".join(filter(None, (where, problem)))
        result = CaseResult(case, not problem, round(gap_s, 2), lost, remark)
        self._say(str(result))
        return result

    def end(self) -> bool:
        """Stop the newest run; return whether it trained on the samples of its order."""
        assert self._training is not None
        if not self._training.is_over:
            self._training.end()
        run = self._training.run
        return run is not None and run.verify().ok

    def _ready(self, case: Case) -> _Training:
        """Return a run that trains, on two nodes or more if no new group is to form."""
        training = self._training
        if training is None or training.is_over:
            self._runs += 1
            config = self._config.override({"run.id": f"points-{self._runs}"})
            training = self._training = _Training(config, self._hear)
        wanted = 1
        if case.point in _WHILE_TRAINING and len(self._cluster.nodes) < 2:
            self._fill()
        if case.point in _WHILE_TRAINING:
            wanted = len(self._cluster.nodes)
        self._until(training, lambda: len(training.group) >= wanted and training.trains, "no group of all nodes formed")
        return training

    def _strike(self, case: Case, training: _Training) -> str:
        """Have the point reached, and inject the fault there. Returns where it hit."""
        self._reached, self._awaited = None, name_of(case.point, case.when)
        self._go.clear()
        try:
            if case.point in _WHILE_TRAINING:
                pass
            elif len(self._cluster.nodes) < 2:
                self._fill()
            else:
                training.lender.ask(GroupRequest.LEAVE)
            self._until(training, lambda: self._reached is not None, "the point was not reached")
            assert self._reached is not None
            node = self._cluster.node_of(self._reached.pid)
            process = f"at node {node[:8]}" if node else "in the controller"
            node = node or next(one for one in reversed(training.lender.processes.plan) if one in self._cluster.nodes)
            self._inject(case.fault, node)
        finally:
            self._awaited = ""
            self._go.set()
        return process if case.fault == "store" else f"{process}, hits node {node[:8]}"

    def _fill(self) -> None:
        """Add the nodes that lack."""
        while len(self._cluster.nodes) < _NODES:
            self._cluster.add()

    def _inject(self, fault: Fault, node: str) -> None:
        """Inject a fault, let the process go on that is held, and wait until the fault is over."""
        if fault == "kill":
            self._cluster.kill(node)
            self._go.set()
        elif fault == "notice":
            Path(self._config.elastic.notice_file.replace("{node}", node)).write_text(f"{_NOTICE_S}")
            self._go.set()
            time.sleep(_NOTICE_S)  # the fault's own duration, as below
            self._cluster.kill(node)
        elif fault == "stop":
            self._cluster.stop(node)
            self._go.set()
            time.sleep(_FAULT_S)
            self._cluster.resume(node)
            self._drop_dead()
        elif fault == "halt":
            self._cluster.halt(node)
            self._go.set()
        else:
            self._store.set(away=True)
            self._go.set()
            time.sleep(_FAULT_S)
            self._store.set(away=False)

    def _drop_dead(self) -> None:
        """Remove the nodes that Ray has given up."""
        from springtide.ray.cluster.nodes import live

        alive = {node["NodeID"] for node in live()}
        for node in self._cluster.nodes:
            if node not in alive:
                self._cluster.kill(node)

    def _go_on(self, training: _Training) -> None:
        """Wait until the fault is overcome."""
        over_s = time.time()
        with self._news:
            self._copied.clear()

        def trains_on() -> bool:
            return set(training.group) <= set(self._cluster.nodes) and training.steps_since(over_s) >= _STEPS_AFTER

        def keeps_snapshots() -> bool:
            group = set(training.group)
            return trains_on() and (len(group) < 2 or group <= self._copied)

        self._until(training, trains_on, "training did not go on")
        self._until(training, keeps_snapshots, "training went on, but not every node copied a snapshot to a peer")
        self._drop_dead()  # a stopped node may be given up only now

    def _until(self, training: _Training, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition. Raises _NotHeld if the run ends, or if it takes too long."""
        with self._news:
            came = self._news.wait_for(lambda: condition() or training.is_over, _PATIENCE_S)
        if training.is_over:
            raise _NotHeld(f"THE RUN ENDED: {training.error or 'as if it was finished'}")
        if not came:
            raise _NotHeld(f"{otherwise} in {_PATIENCE_S:.0f} s")

    def _hear(self, event: Event | None) -> None:
        with self._news:
            self._news.notify_all()
        if event is not None and event.kind in ("started", "decided", "left", "failed", "ready", "stopped"):
            self._say(f"  {event.describe()}")


class _NotHeld(Exception):
    """A case did not hold."""
