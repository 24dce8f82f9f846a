"""A drill: real training on a local cluster of several raylets, whose nodes get notices, are killed and are added; and the
same training undisturbed (the twin), for comparison."""

from __future__ import annotations

import dataclasses
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from springtide import config as configs
from springtide.app.fault_watch import name_of, watch
from springtide.app.simulate import read_trace
from springtide.app.stage import NOTICE_S, Act, ActDone, Stage
from springtide.config import Config
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, simulate
from springtide.elastic.traces import of_nodes, smaller
from springtide.errors import ConfigError, explain
from springtide.events import Event, Ready, Saved, Started, StepDone
from springtide.faults import POINTS, When
from springtide.run.folder import Run
from springtide.track.ledger import Ledger

Say = Callable[[str], None]
_TRACE_NODES = 4
_STEPS_BETWEEN = 100
"""Average number of steps between two changes of a trace."""
_OF_A_RESTART = tuple(
    name_of(point, when) for point in POINTS if point not in ("replicate", "commit") for when in get_args(When)
)
"""Names of the fault points that are passed when a group ends or forms."""
_IN_RESTART = 0.8
"""Share of the faults after a kill or a hang that come in the restart."""
_SAME_LOSS = 1e-4
"""Largest difference between the losses of two runs that count as the same [nats]."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The plan of a drill."""

    workers: int
    acts: tuple[Act, ...]
    steps: int
    about: str
    most: int = 0
    """Most workers, if more than ``workers`` at the start."""

    @property
    def max_workers(self) -> int:
        """Most workers at any time."""
        return max(self.workers, self.most)


def storm(seed: int, faults: int) -> Scenario:
    """Return random faults, with joins between them; the cluster never loses its last node. Most faults that follow a kill or a
    hang come at a fault point of the restart which that causes: while no group trains."""
    chance = random.Random(seed)
    nodes, acts, step, left = 3, list[Act](), 20, faults
    while left:
        kinds = ["hang", "kill", "drain"] if nodes > 1 else ["hang"]
        what = "add" if nodes == 1 or (nodes < 3 and chance.random() < 0.5) else chance.choice(kinds)
        left -= what != "add"
        nodes += {"add": 1, "kill": -1, "drain": -1, "hang": 0}[what]
        in_restart = what != "add" and acts and acts[-1].what in ("kill", "hang") and chance.random() < _IN_RESTART
        at = chance.choice(_OF_A_RESTART) if in_restart else ""
        acts.append(Act(acts[-1].step if at else step, what, at=at))
        step += chance.randrange(1, 30)
    return Scenario(3, tuple(acts), step + 40, f"{faults} faults at random, seed {seed}")


def traced(_: int, changes: int, trace: str) -> Scenario:
    """Return the first ``changes`` of a record of spot capacity, scaled to a few nodes and a short run. Raises ConfigError if
    the record has no change."""
    numbers = smaller(read_trace(trace), _TRACE_NODES)[: changes + 1]
    if len(numbers) < 2:
        raise ConfigError(explain("--trace", trace, "has no change of the number of nodes", "give another record"))
    (begin_s, here), (end_s, _) = numbers[0], numbers[-1]
    first, acts = here, []
    for time_s, number in numbers[1:]:
        step = 20 + round((time_s - begin_s) / (end_s - begin_s) * _STEPS_BETWEEN * len(numbers))
        acts.append(Act(step, "add" if number > here else "drain", abs(number - here)))
        here = number
    about = f"{len(acts)} changes of {Path(trace).name}, on at most {_TRACE_NODES} nodes"
    return Scenario(first, tuple(acts), acts[-1].step + 60, about, most=_TRACE_NODES)


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "kill": lambda *_: Scenario(3, (Act(40, "kill"),), 100, "a node and all its processes are killed"),
    "drain": lambda *_: Scenario(3, (Act(40, "drain"),), 120, "a node is announced to leave, and leaves"),
    "regrow": lambda *_: Scenario(3, (Act(40, "kill"), Act(60, "add")), 260, "a node is killed, another one joins"),
    "hang": lambda *_: Scenario(2, (Act(40, "hang"),), 60, "a worker's process is stopped and does not answer"),
    "resize": lambda *_: Scenario(
        8,
        (Act(15, "drain", 3, 8), Act(35, "add", 2, 5), Act(60, "add", 1, 7), Act(80, "kill", 1, 8)),
        230,
        "8 -> 5 -> 7 -> 8 -> 7 workers: three leave with a notice, two join, another joins, one leaves without",
    ),
    "all": lambda *_: Scenario(
        3, (Act(15, "drain"), Act(60, "kill"), Act(80, "add")), 320, "one leaves with a notice, one without, one joins"
    ),
    "storm": lambda seed, faults, _: storm(seed, faults),
    "trace": traced,
}


def config_of(scenario: Scenario, root: str) -> Config:
    """Return the tiny recipe at the size of the drill, with exact sums, so that any error of a resize shows in the losses."""
    base = configs.recipes.tiny()
    rows = 24
    changes = {
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "model.num_layers": 2,
        "model.dim": 64,
        "model.ffn_dim": 176,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "stream.lanes": 12 if scenario.workers > 4 else 4,
        "parallel.reduction": "fp64",
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": scenario.max_workers,
        "elastic.grow": "always",
        "elastic.hang": 15.0,
        "elastic.notices": "file",
        "elastic.notice_file": f"{root}/notice-{{node}}",
        "train.total": scenario.steps * rows * base.shards.sequence_length,
        "checkpoint.memory_every": 1,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return base.override(changes)


@dataclasses.dataclass(frozen=True)
class DrillResult:
    """What a drill cost, and whether it changed the training."""

    digests_match: bool
    """Whether every step trained on the samples of the undisturbed twin's."""
    is_verified: bool
    """Whether it also trained on the samples of the order; see ``run.verify``."""
    loss_max_abs_diff: float
    """Largest difference to the twin's loss at a step [nats]."""
    ledger: Ledger
    """Where the time went; its ``restarts`` have the gaps and the lost steps."""
    events: tuple[ActDone, ...]
    """What happened to the nodes, in order of time."""
    leftovers: dict[str, int]
    """Actors and placement groups that the drill left in the cluster, by name."""
    steps: int
    """Number of steps that were trained."""
    commits_lost: int = 0
    """How often a group began before the newest checkpoint that was committed."""
    left_undone: tuple[str, ...] = ()
    """The part of the scenario that was not carried out, because training was over."""
    predicted_goodput: float | None = None
    """The simulator's prediction, from 0 to 1; None unless the scenario is a trace."""

    @property
    def ok(self) -> bool:
        """Whether the whole drill was carried out, changed nothing and left nothing."""
        same = self.digests_match and self.is_verified and self.loss_max_abs_diff <= _SAME_LOSS
        return same and not (self.commits_lost or self.leftovers or self.left_undone)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, as ``springtide drill --json`` prints it."""
        restarts = self.ledger.restarts
        found = {
            "ok": self.ok,
            "digests_match": self.digests_match,
            "loss_max_abs_diff": self.loss_max_abs_diff,
            "gaps_s": [round(one.gap_s, 2) for one in restarts],
            "steps_lost": [one.steps_lost for one in restarts],
            "goodput": round(self.ledger.goodput, 4),
            "restarts": [dataclasses.asdict(one) for one in restarts],
            "spent": {kind: round(worker_s, 2) for kind, worker_s in self.ledger.spent.items()},
            "events": [dataclasses.asdict(one) for one in self.events],
            "commits_lost": self.commits_lost,
            "leftovers": self.leftovers,
            "steps": self.steps,
            "left_undone": list(self.left_undone),
        }
        if self.predicted_goodput is not None:
            found["predicted_goodput"] = round(self.predicted_goodput, 4)
        return found

    def describe(self) -> str:
        """Return the result as text of four lines."""
        same = "the same samples at every step" if self.digests_match else "OTHER SAMPLES THAN THE UNDISTURBED TWIN"
        predicted = "" if self.predicted_goodput is None else f", {self.predicted_goodput:.1%} predicted"
        restarts = self.ledger.restarts
        return f"""{same}; losses differ by {self.loss_max_abs_diff:.1e} at most
without a step   {", ".join(f"{one.gap_s:.1f} s" for one in restarts) or "none"}
steps lost       {", ".join(str(one.steps_lost) for one in restarts) or "none"}
goodput          {self.ledger.goodput:.1%}{predicted}"""


def drill(name: str, say: Say, seed: int = 0, faults: int = 20, trace: str = "", keep: str = "") -> DrillResult:
    """Train on a local cluster whose nodes are lost, and compare with an undisturbed twin. Takes minutes.

    Args:
        name: scenario, one of ``SCENARIOS``.
        say: receives each event as a line of text, as it happens.
        seed: of the storm.
        faults: number of faults of the storm, or of changes of the trace.
        trace: path of a record of spot capacity, for the scenario ``trace``.
        keep: folder in which the two runs stay; if empty, they are removed.

    Returns:
        What the faults cost, and whether they changed the training.

    Raises:
        ConfigError: the scenario is not known, or the file is not a record.

    Examples:
        >>> from springtide.app.drill import drill
        >>> drill("kill", print).ok  # doctest: +SKIP
        True
    """
    if name not in SCENARIOS:
        raise ConfigError(explain("scenario", name, "is not known", f"one of {', '.join(SCENARIOS)}"))
    scenario = SCENARIOS[name](seed, faults, trace)
    root = keep or tempfile.mkdtemp(prefix="springtide-drill-")
    try:
        return _drill(scenario, config_of(scenario, root), say)
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def _drill(scenario: Scenario, config: Config, say: Say) -> DrillResult:
    from springtide.app.prepare import prepare
    from springtide.app.train import train
    from springtide.on_ray.cluster.local import LocalCluster
    from springtide.on_ray.cluster.nodes import leftovers

    config = prepare(config)
    begin = time.time()

    def progress(text: str) -> None:
        say(f"{time.time() - begin:6.1f} s  {text}")

    say(f"{scenario.about}; {scenario.steps} steps on {scenario.workers} nodes, twice: undisturbed, then the drill")
    with LocalCluster(scenario.workers) as cluster:
        progress("the twin trains")
        twin = train(config.override({"run.id": "twin", "elastic.max_workers": 1}))
        progress(f"the twin is done; now the drill: {', '.join(str(act) for act in scenario.acts)}")
        stage = Stage(cluster, scenario.acts, config.elastic.notice_file, progress)

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                stage.reach(event.step, event.world_size)
            elif event.kind in ("started", "decided", "left", "failed", "ready", "stopped"):
                progress(event.describe())

        with watch(stage.pass_point):
            run = train(config.override({"run.id": "drilled"}), listen=listen)
        stage.end()
        left = leftovers()
    found = dataclasses.replace(
        compare(run, twin, stage.done, left),
        left_undone=tuple(str(act) for act in stage.to_come),
        predicted_goodput=predict(scenario, run, twin, stage.done) if scenario.most else None,
    )
    if found.left_undone:  # a drill that was not carried out shows nothing
        progress(f"NOT DONE, because training was over: {', '.join(found.left_undone)}")
    return found


def compare(run: Run, twin: Run, events: Sequence[ActDone], leftovers: dict[str, int]) -> DrillResult:
    """Compare a drilled run with its twin. ``events``: what was done to its nodes; ``leftovers``: what it left there."""
    mine, theirs = {one.step: one for one in run.steps}, {one.step: one for one in twin.steps}
    both = mine.keys() & theirs.keys()
    return DrillResult(
        digests_match=mine.keys() == theirs.keys() and all(mine[step].digest == theirs[step].digest for step in both),
        is_verified=run.verify().ok,
        loss_max_abs_diff=max((abs(mine[step].loss - theirs[step].loss) for step in both), default=0.0),
        ledger=run.ledger,
        events=tuple(events),
        leftovers=leftovers,
        steps=len(mine),
        commits_lost=commits_lost(run.events),
    )


def commits_lost(events: Sequence[Event]) -> int:
    """Return how often a group began before the newest checkpoint that was committed."""
    newest = lost = 0
    for event in events:
        if isinstance(event, Saved):
            newest = max(newest, event.step)
        lost += isinstance(event, Started) and event.step < newest
    return lost


def predict(scenario: Scenario, run: Run, twin: Run, done: Sequence[ActDone]) -> float:
    """Return the goodput that the simulator predicts for the changes as they happened. It uses the measured times of a step, a
    median restart, the first start and each new process, and the twin's share of waits for saves and data. When to restart,
    with which workers, and the total cost come from the simulation."""
    begin_s, steps, book = min(event.time_s for event in run.events), run.steps, run.ledger
    joined = {one.node: one.time_s - begin_s for one in done if one.what == "add"}
    gone = {one.node: one.time_s - begin_s + NOTICE_S for one in done if one.what == "drain"}
    ready = {one.node[:8]: one.time_s - begin_s for one in run.events if isinstance(one, Ready)}
    warm_ups_s = {node: max(0.0, ready[node] - time_s) for node, time_s in joined.items() if node in ready}
    first = [node for node in gone if node not in joined]
    first += [f"stays-{one}" for one in range(scenario.workers - len(first))]
    rows = [(time_s, True, node) for node, time_s in [*dict.fromkeys(first, 0.0).items(), *joined.items()]]
    rows += [(time_s, False, node) for node, time_s in gone.items()]
    trace = dataclasses.replace(of_nodes(rows), end_s=steps[-1].time_s - begin_s)
    start_s = steps[0].time_s - steps[0].step_time_s - begin_s
    costs = Costs(
        step_s=statistics.median(one.step_time_s for one in steps),
        restart_s=statistics.median(one.gap_s for one in book.restarts) if book.restarts else 0.0,
        first_start_s=start_s,
        warm_up_s=start_s,
        notice_s=NOTICE_S,
    )
    found = simulate(trace, Bounds(1, scenario.max_workers, grow="always"), costs, warm_ups_s)
    spent = twin.ledger.spent
    return found.goodput * spent["productive"] / (spent["productive"] + spent["data_stall"] + spent["checkpoint_stall"])
