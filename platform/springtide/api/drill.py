"""A drill: real training on a local cluster of several raylets (Ray nodes) while nodes are killed and added, some of them after
an announcement (notice). A second run without faults, the twin, is trained with an equal config for comparison."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from springtide.config import Config
from springtide.elastic.forecast import RunHistory
from springtide.elastic.policy import Bounds
from springtide.elastic.simulate import Costs, simulate
from springtide.elastic.stalled import found_by_s
from springtide.elastic.traces import of_nodes
from springtide.errors import ConfigError, explain
from springtide.events import Decided, Event, Failed, Left, Ready, Saved, Started, StepDone
from springtide.events.record import record
from springtide.planning.scenarios import NOTICE_S, SCENARIOS, ActDone, Scenario, Stage, config_of, with_notice
from springtide.run import control
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.ledger import Ledger

Say = Callable[[str], None]
_SAME_LOSS = 1e-4
"""Two losses count as equal if they differ by no more than this [nats]."""


@dataclasses.dataclass(frozen=True)
class DrillResult:
    """Result of a drill: what its faults cost, and whether they changed the training."""

    digests_match: bool
    """True if every step trained on the same samples as in the undisturbed twin."""
    is_verified: bool
    """True if every step trained on the samples that the run's fixed order of samples assigns to it; see ``run.verify``."""
    loss_max_abs_diff: float
    """Largest difference between the losses of the run and its twin at the same step [nats]."""
    ledger: Ledger
    """Worker-seconds of the run by kind, such as productive or lost. Its ``restarts`` list the time and the steps that each
    restart cost."""
    events: tuple[ActDone, ...]
    """What the drill did to the nodes, in order of time. Examples: announce a loss (notice), kill, add."""
    leftovers: dict[str, int]
    """Actors and placement groups that the drill left in the cluster: name -> number."""
    steps: int
    """Number of steps that were trained."""
    commits_lost: int = 0
    """Number of worker groups that started from an earlier step than that of the newest committed checkpoint. Should be 0."""
    left_undone: tuple[str, ...] = ()
    """Faults of the scenario that the drill did not cause, because training had already ended."""
    predicted_goodput: float | None = None
    """The simulator's prediction of the goodput (productive share of the worker-seconds), from 0 to 1. None unless the scenario
    replays a record of spot capacity."""
    kept: tuple[Kept, ...] = ()
    """How the run handled each announced loss of a node (notice), each hang, and each loss of all in-memory copies of a part of
    its state."""

    @property
    def ok(self) -> bool:
        """True if the drill caused all its faults, training was not changed by them, nothing was left in the cluster, and the
        run handled each fault as promised (see ``broken``)."""
        same = self.digests_match and self.is_verified and self.loss_max_abs_diff <= _SAME_LOSS
        return same and not (self.commits_lost or self.leftovers or self.left_undone or self.broken)

    @property
    def broken(self) -> list[str]:
        """The promises about handling a fault that the run broke, as text; empty if it kept all promises."""
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
        """Return the result as text: four lines on costs and losses, one line per handled fault (``kept``), and one line per
        broken promise."""
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
    """Train on a local cluster whose nodes are lost, and compare with the same training without faults. Takes minutes.

    Args:
        name: scenario, one of ``SCENARIOS``.
        say: receives each event as a line of text, as it happens.
        faults: number of capacity changes to replay from the record, for the scenario ``trace``.
        trace: path of a record of spot capacity, for the scenario ``trace``.
        keep: folder to keep the drilled run and its twin in; if empty, both are removed.
        notice_s: time between the announcement of a node's loss and the loss, for the scenario ``drain`` [s].

    Returns:
        The cost of the faults, and whether they changed the training.

    Raises:
        ConfigError: the scenario is not known, an option is not one of the scenario's, or the file is not a record.

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
    """Train the run of a scenario, and its twin: the same training without faults. Returns the comparison.

    Args:
        scenario: the faults of the nodes, and the steps or times at which they happen.
        config: config of both runs, as ``config_of`` returns it.
        say: receives each event as a line of text, as it happens.
        cluster_of: makes a cluster with the given number of nodes, such as ``LocalCluster``.
        stage_of: makes the object that causes the faults, such as ``Stage``.
    """
    from springtide.api.prepare import prepare
    from springtide.api.train import train
    from springtide.ray.cluster.nodes import leftovers

    config = prepare(config)
    begin = time.time()

    def progress(text: str) -> None:
        say(f"{time.time() - begin:6.1f} s  {text}")

    def train_twin(last: int) -> Run:
        """Train the twin (the run without faults) to step ``last``."""
        twin = config.override({"run.id": "twin", "elastic.max_workers": 1})
        return train(twin, listen=lambda event: _stop(twin, event, last))

    def train_drilled(stage: Stage) -> Run:
        """Train the run on the nodes that are lost and added."""
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
    if found.left_undone:  # report faults that did not happen: a drill without its faults proves nothing
        progress(f"NOT DONE, because training was over: {', '.join(found.left_undone)}")
    return found


def _kept(scenario: Scenario, config: Config, run: Run, done: Sequence[ActDone]) -> tuple[Kept, ...]:
    """Return how the run handled the fault of a scenario with a single fault. If the scenario has several faults, the result is
    empty: they affect each other, so no promise is made."""
    if len(scenario.acts) > 1:
        return ()
    return kept_of(run.events, done, float(config.elastic.reserve), live=scenario.strategy == "ddp")


def _stop(config: Config, event: Event, last: int) -> None:
    """Send a run the stop command when it has done step ``last``. Does nothing if ``last`` is the run's last step, because the
    run then ends anyway."""
    if isinstance(event, StepDone) and event.step == last < config.num_steps:
        control.give(Folder(config.run.root) / config.run.id, "stop")


def compare(run: Run, twin: Run, events: Sequence[ActDone], leftovers: dict[str, int], last: int) -> DrillResult:
    """Compare a drilled run with its twin (without faults) up to step ``last``. Later steps of either run are ignored.
    ``events``: the faults that the drill caused; ``leftovers``: number of actors and placement groups left in the cluster, by
    name."""
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
    """Return the number of worker groups that started from an earlier step than that of the newest checkpoint committed
    before."""
    newest = lost = 0
    for event in events:
        if isinstance(event, Saved):
            newest = max(newest, event.step)
        lost += isinstance(event, Started) and event.step < newest
    return lost


def predict(scenario: Scenario, run: Run, twin: Run, done: Sequence[ActDone]) -> float:
    """Return the goodput (productive share of the worker-seconds) that the simulator predicts for a drill, given the times at
    which its nodes were lost and added.

    Measured inputs: the duration of a step, of a median restart, of the first start and of a process start. Also the fraction
    of time in which the twin (the run without faults) waited for saves and data. The simulator computes when to restart, with
    which workers, and the total cost."""
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


# Assertions that a drill checks in the run's events, besides equal losses. After the announcement of a node's loss (notice),
# training continues until the last safe moment. A hung worker is found in time, and its rank is named. If the remaining devices
# hold the whole training state, the run resumes from their state.
#
# fault that the drill caused (a notice, a hang, two nodes killed) -> the run's reaction, with times -> the broken promises

_LOOKS_S = 0.5
"""Tolerance for the controller's polling [s]. The controller can ask a group to leave only when it polls the nodes, and it
polls several times in this period."""
_LIVE = "live copy"
"""Prefix of ``Started.resumed_from`` if a worker group got its state from the devices of workers that survived."""


@dataclasses.dataclass(frozen=True)
class NoticeKept:
    """Reaction to a notice (announced loss of a node): how the worker group left the node before the loss."""

    node: str
    """The first 8 characters of the node's id."""
    notice_s: float
    """Time between the notice and the loss [s]."""
    margin_s: float
    """How long before the loss the group should be asked to leave [s]. Computed from the step times and copy times that were
    measured until then."""
    asked_s: float
    """How long before the loss the group was asked to leave [s]."""
    left_s: float
    """How long before the loss the group's last step ended [s]."""
    steps: int
    """Number of steps that ended after the group was asked to leave and before it ended."""
    step_s: float
    """Time that a step usually takes, as measured in the run [s]."""
    steps_lost: int

    @property
    def broken(self) -> str:
        """Text about the broken promise; empty if the promise was kept. Promised: no step is lost, and ``asked_s`` differs from
        ``margin_s`` by at most one step plus one poll."""
        if self.steps_lost:
            return f"a notice cost {self.steps_lost} steps"
        if abs(self.asked_s - self.margin_s) > self.step_s + _LOOKS_S:
            return f"node {self.node} was left {self.asked_s:.1f} s before its loss, {self.margin_s:.1f} s would do"
        return ""

    def describe(self) -> str:
        """Return the run's reaction to the fault as a line of text."""
        last = f"{self.steps} steps later the last one ends, {self.left_s:.2f} s before it"
        asked = f"asked to leave {self.asked_s:.2f} s before the loss, measured margin {self.margin_s:.2f} s"
        return f"notice of {self.notice_s:g} s: {asked}; {last}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class HangFound:
    """Reaction to a hung worker: how it was found."""

    node: str
    """The first 8 characters of the id of the worker's node."""
    found_s: float
    """Time from the group's last step until the group was ended [s]."""
    limit_s: float
    """The longest time allowed for ``found_s`` [s]."""
    named: bool
    """True if the reported reason names the rank that all other ranks wait for."""
    steps_lost: int

    @property
    def broken(self) -> str:
        """Text about the broken promise; empty if the promise was kept. Promised: the stacks of the other ranks show which rank
        hangs, and the hang is found within ``limit_s``."""
        if not self.named:
            return f"nobody said that the others wait for node {self.node}"
        if self.found_s > self.limit_s:
            return f"the hang of node {self.node} was found after {self.found_s:.1f} s, not {self.limit_s:.1f} s"
        return ""

    def describe(self) -> str:
        """Return the run's reaction to the fault as a line of text."""
        how = "named by what the others do" if self.named else "NOT NAMED"
        found = f"found {self.found_s:.2f} s after the last step, limit {self.limit_s:.2f} s"
        return f"hang: {found}; {how}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class CopiesLost:
    """Reaction to the loss of all nodes that held some part of the newest in-memory snapshot: the source from which the run
    resumed."""

    resumed_from: str
    steps_lost: int

    @property
    def broken(self) -> str:
        """Text about the broken promise; empty if the promise was kept. Promised: the run resumes from the devices of the
        surviving workers, which hold the state after the last step, so no step is lost."""
        if not self.resumed_from.startswith(_LIVE) or self.steps_lost:
            return f"the loss of all copies was answered from {self.resumed_from}, with {self.steps_lost} steps lost"
        return ""

    def describe(self) -> str:
        """Return the run's reaction to the fault as a line of text."""
        return f"all copies of a snapshot lost: resumed from {self.resumed_from}; {self.steps_lost} steps lost"


@dataclasses.dataclass(frozen=True)
class NotSeen:
    """A fault to which the run did not react: none of the run's events answers it."""

    act: str
    node: str
    """The first 8 characters of the node's id."""

    @property
    def broken(self) -> str:
        """Text about the missing reaction. It counts as a broken promise: the fault may have hit a node without a worker, and
        then the drill proves nothing."""
        return f"the run shows no answer to {self.act} of node {self.node}"

    def describe(self) -> str:
        """Return the fault and the missing reaction as a line of text."""
        return f"{self.act}: no answer"


Kept = NoticeKept | HangFound | CopiesLost | NotSeen


def kept_of(events: Sequence[Event], done: Sequence[ActDone], reserve_s: float, live: bool = False) -> tuple[Kept, ...]:
    """Return how the run handled each notice (announced loss of a node), each hang, and each loss of all in-memory copies.

    Args:
        events: events of the drilled run, from its journal.
        done: the faults that the drill caused on its nodes.
        reserve_s: value of ``elastic.reserve``: least time to keep free for saving the state before a node's loss [s].
        live: True if each worker has the whole state on its device: then the loss of all in-memory copies must cost no step.
    """
    ordered = sorted(events, key=lambda event: event.time_s)
    found: list[Kept] = []
    for act in done:
        if act.what == "drain":
            found.append(next(_notice(ordered, act, reserve_s), NotSeen(act.what, act.node)))
        elif act.what == "hang":
            found.append(next(_hang(ordered, act), NotSeen(act.what, act.node)))
    lost = [act for act in done if act.what == "kill-copies"]
    if lost and live:
        found.append(next(_copies(ordered, lost[-1].time_s), NotSeen(lost[-1].what, lost[-1].node)))
    return tuple(found)


def _notice(events: Sequence[Event], act: ActDone, reserve_s: float) -> Iterator[NoticeKept]:
    history, lost_s = RunHistory(0), act.time_s + act.notice_s
    for place, event in enumerate(events):
        if event.time_s > act.time_s and _leaves(event, act.node):
            forecast = history.prospects()
            later = events[place:]
            end = next((number for number, one in enumerate(later) if isinstance(one, Left | Started)), len(later))
            last = [one for one in later[:end] if isinstance(one, StepDone)]
            last_s = last[-1].time_s if last else event.time_s
            yield NoticeKept(
                node=act.node,
                notice_s=act.notice_s,
                margin_s=round(forecast.leaving_s(reserve_s, durable=False), 3),
                asked_s=round(lost_s - event.time_s, 3),
                left_s=round(lost_s - last_s, 3),
                steps=len(last),
                step_s=round(forecast.step_s, 4),
                steps_lost=_lost(events, event.time_s),
            )
            return
        history.add(record(event))


def _leaves(event: Event, node: str) -> bool:
    return (
        isinstance(event, Decided)
        and event.decision == "leave"
        and event.reason.startswith("notice: ")
        and node in event.reason
    )


def _hang(events: Sequence[Event], act: ActDone) -> Iterator[HangFound]:
    history, last_s = RunHistory(0), act.time_s
    for event in events:
        if event.time_s > act.time_s and isinstance(event, Failed) and event.cause == "hung":
            yield HangFound(
                node=act.node,
                found_s=round(event.time_s - last_s, 3),
                limit_s=round(found_by_s(history.prospects().step_s), 3),
                named="all other ranks wait for" in event.reason,
                steps_lost=_lost(events, event.time_s),
            )
            return
        if isinstance(event, StepDone):
            last_s = event.time_s
        history.add(record(event))


def _copies(events: Sequence[Event], lost_s: float) -> Iterator[CopiesLost]:
    for event in events:
        if event.time_s > lost_s and isinstance(event, Started):
            yield CopiesLost(event.resumed_from, _lost(events, lost_s))
            return


def _lost(events: Sequence[Event], since_s: float) -> int:
    """Return the number of steps lost by a fault at ``since_s``: the steps that the next worker group trains again."""
    done = 0
    for event in events:
        if isinstance(event, StepDone):
            done = event.step
        elif isinstance(event, Started) and event.time_s > since_s:
            return max(0, done - event.step)
    return 0
