"""A drill: real training on a local cluster of several raylets, whose nodes get notices, are killed and are added; and the
same training undisturbed (the twin), for comparison."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from springtide.api.promises import Kept, kept_of
from springtide.config import Config
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, simulate
from springtide.elastic.traces import of_nodes
from springtide.errors import ConfigError, explain
from springtide.events import Event, Ready, Saved, Started, StepDone
from springtide.planning.scenarios import NOTICE_S, SCENARIOS, ActDone, Scenario, Stage, config_of, with_notice
from springtide.run import control
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.ledger import Ledger

Say = Callable[[str], None]
_SAME_LOSS = 1e-4
"""Largest difference between the losses of two runs that count as the same [nats]."""


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
    kept: tuple[Kept, ...] = ()
    """What became of each notice, each hang, and each loss of all copies."""

    @property
    def ok(self) -> bool:
        """Whether the whole drill was carried out, changed nothing, left nothing and broke no promise."""
        same = self.digests_match and self.is_verified and self.loss_max_abs_diff <= _SAME_LOSS
        return same and not (self.commits_lost or self.leftovers or self.left_undone or self.broken)

    @property
    def broken(self) -> list[str]:
        """The promises that did not hold."""
        return [one.broken for one in self.kept if one.broken]

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
            "kept": [{"what": type(one).__name__, **dataclasses.asdict(one)} for one in self.kept],
            "broken": self.broken,
        }
        if self.predicted_goodput is not None:
            found["predicted_goodput"] = round(self.predicted_goodput, 4)
        return found

    def describe(self) -> str:
        """Return the result as text: four lines, and one for each notice, hang and loss of all copies."""
        same = "the same samples at every step" if self.digests_match else "OTHER SAMPLES THAN THE UNDISTURBED TWIN"
        predicted = "" if self.predicted_goodput is None else f", {self.predicted_goodput:.1%} predicted"
        restarts = self.ledger.restarts
        text = f"""{same}; losses differ by {self.loss_max_abs_diff:.1e} at most
without a step   {", ".join(f"{one.gap_s:.1f} s" for one in restarts) or "none"}
steps lost       {", ".join(str(one.steps_lost) for one in restarts) or "none"}
goodput          {self.ledger.goodput:.1%}{predicted}"""
        return "\n".join([text, *(one.describe() for one in self.kept), *(f"BROKEN: {one}" for one in self.broken)])


def drill(
    name: str,
    say: Say,
    faults: int = 20,
    trace: str = "",
    keep: str = "",
    notice_s: float = NOTICE_S,
) -> DrillResult:
    """Train on a local cluster whose nodes are lost, and compare with an undisturbed twin. Takes minutes.

    Args:
        name: scenario, one of ``SCENARIOS``.
        say: receives each event as a line of text, as it happens.
        faults: number of changes of the trace.
        trace: path of a record of spot capacity, for the scenario ``trace``.
        keep: folder in which the two runs stay; if empty, they are removed.
        notice_s: time between the notice and the loss, for the scenario ``drain`` [s].

    Returns:
        What the faults cost, and whether they changed the training.

    Raises:
        ConfigError: the scenario is not known or has no such option, or the file is not a record.

    Examples:
        >>> from springtide.api.drill import drill
        >>> drill("kill", print).ok  # doctest: +SKIP
        True
    """
    if name not in SCENARIOS:
        raise ConfigError(explain("scenario", name, "is not known", f"one of {', '.join(SCENARIOS)}"))
    if notice_s != NOTICE_S and name != "drain":
        raise ConfigError(explain("--notice", notice_s, f"is given for the scenario {name}", "it is for drain only"))
    scenario = with_notice(notice_s) if name == "drain" else SCENARIOS[name](faults, trace)
    from springtide.ray.cluster.local import LocalCluster

    root = keep or tempfile.mkdtemp(prefix="springtide-drill-")
    try:
        return carry_out(scenario, config_of(scenario, root), say, LocalCluster, Stage)
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def carry_out(
    scenario: Scenario, config: Config, say: Say, cluster_of: Callable[[int], Any], stage_of: Callable[..., Stage]
) -> DrillResult:
    """Train the run of a scenario and its twin.

    Args:
        scenario: what happens.
        config: of both runs, as ``config_of`` returns it.
        say: receives each event as a line of text, as it happens.
        cluster_of: makes the cluster of a number of nodes, such as ``LocalCluster``.
        stage_of: makes what carries out the acts, such as ``Stage``.
    """
    from springtide.api.prepare import prepare
    from springtide.api.train import train
    from springtide.ray.cluster.nodes import leftovers

    config = prepare(config)
    begin = time.time()

    def progress(text: str) -> None:
        say(f"{time.time() - begin:6.1f} s  {text}")

    def train_twin(last: int) -> Run:
        """Train the twin to the step ``last``."""
        twin = config.override({"run.id": "twin", "elastic.max_workers": 1})
        return train(twin, listen=lambda event: _stop(twin, event, last))

    def train_drilled(stage: Stage) -> Run:
        """Train the run that the drill is about."""
        drilled = config.override({"run.id": "drilled"})

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                stage.reach(event.step, event.world_size)
                if stage.over_at is not None and scenario.steps_after:
                    _stop(drilled, event, stage.over_at + scenario.steps_after)
            elif event.kind in ("started", "decided", "left", "failed", "ready", "stopped"):
                progress(event.describe())

        return train(drilled, listen=listen)

    acts = ", ".join(str(act) for act in scenario.acts)
    long = "until that is over" if scenario.steps_after else f"{scenario.steps} steps"
    say(f"{scenario.about}; {long} on {scenario.workers} nodes, twice: undisturbed, and the drill")
    with cluster_of(scenario.workers) as cluster:
        stage = stage_of(cluster, scenario.acts, config.elastic.notice_file, progress)
        if scenario.steps_after:
            progress(f"the drill: {acts}")
            run = train_drilled(stage)
            progress("the twin trains")
            twin = train_twin(run.last_step)
        else:
            progress("the twin trains")
            twin = train_twin(config.num_steps)
            progress(f"the twin is done; now the drill: {acts}")
            run = train_drilled(stage)
        stage.end()
        left = leftovers()
    found = dataclasses.replace(
        compare(run, twin, stage.done, left, run.last_step if scenario.steps_after else config.num_steps),
        left_undone=tuple(str(act) for act in stage.to_come),
        predicted_goodput=predict(scenario, run, twin, stage.done) if scenario.most else None,
        kept=_kept(scenario, config, run, stage.done),
    )
    if found.left_undone:  # a drill that was not carried out shows nothing
        progress(f"NOT DONE, because training was over: {', '.join(found.left_undone)}")
    return found


def _kept(scenario: Scenario, config: Config, run: Run, done: Sequence[ActDone]) -> tuple[Kept, ...]:
    """Return what became of the only act of a scenario; several meet each other, and promise less."""
    if len(scenario.acts) > 1:
        return ()
    return kept_of(run.events, done, float(config.elastic.reserve), live=scenario.strategy == "ddp")


def _stop(config: Config, event: Event, last: int) -> None:
    """Have a run stop that has just done the step ``last``, unless that ends it anyway."""
    if isinstance(event, StepDone) and event.step == last < config.num_steps:
        control.give(Folder(config.run.root) / config.run.id, "stop")


def compare(run: Run, twin: Run, events: Sequence[ActDone], leftovers: dict[str, int], last: int) -> DrillResult:
    """Compare a drilled run with its twin, which may have trained further than to its step ``last``. ``events``: what was done
    to its nodes; ``leftovers``: what it left there."""
    mine, theirs = ({one.step: one for one in each.steps if one.step <= last} for each in (run, twin))
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
    gone = {one.node: one.time_s - begin_s + one.notice_s for one in done if one.what == "drain"}
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
