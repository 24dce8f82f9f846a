"""Find from a run's journal what limits its speed: findings with numbers and a remedy, the most costly first.

Shares are fractions of the worker-time that the run held (``tracking/ledger.py``). Shares of different findings may overlap: a
slow rank also lowers MFU.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from springtide.events import (
    Decided,
    Event,
    Failed,
    Profiled,
    Resumed,
    RolledBack,
    Saved,
    SaveFailed,
    SaveSkipped,
    Spiked,
    Started,
    StepDone,
    Straggling,
    Waited,
)
from springtide.tracking.ledger import Ledger, LedgerBuilder, Prices
from springtide.tracking.timeline import Timeline

_RECENT_STEPS = 200
"""Number of newest steps that medians are taken over: enough to be stable, few enough to show the present."""
_DATA = 0.05
"""Report waits for data if they take at least this share of time. With prefetching they normally take below 1 %. The margin
allows for one slow read."""
_COMMUNICATION = 0.30
"""Report exposed communication (not overlapped with computation) if it takes more than this share of a profiled step. Published
runs of dense models stay below it."""
_IDLE = 0.30
"""Report an idle device if it is idle for more than this share of a profiled step."""
_REACHED_MFU = 0.40
"""MFU that large dense models reach in bf16, by published figures (PaLM 46 %, Llama 3 38 to 43 %)."""
_LOW_MFU = 0.25
"""Report an MFU below this value. At ``_REACHED_MFU`` the same computation would take at least a third less time."""
_RESTARTS = 0.05
"""Report restarts if the gaps between worker groups and the steps trained again take at least this share of time."""
_START_UP = 0.10
"""Report start-up if it takes at least this share of time. It takes a fixed time, so it is a large share of a short run."""
_SAVES = 0.03
"""Report checkpoint saves if training waits for them for at least this share of time. Saves are written in the background; only
the copy to memory stalls training."""
_WAITING = 0.03
"""Report waits for capacity (free nodes) if they take at least this share of time."""
_EVALUATION = 0.05
"""Report evaluations if training waits for them for at least this share of time."""
_PAUSED = 0.03
"""Report pauses by ``train.only_when`` if they take at least this share of time."""
_SKIPPED = 0.01
"""Report skipped weight updates if at least this share of all steps had none. With a dynamic loss scale, a few skipped steps at
the start are normal."""
_SLOW_READER = 2.0
"""Name the rank with the longest wait for data if it waits more than this many times the other ranks' median wait."""
_MOST_NAMED = 5
"""At most this many stragglers (slow ranks) get a finding of their own."""
_SHOWN = 120
"""At most this many characters of an event's reason are quoted in a finding."""

REMEDIES = {
    "data": "feed.reads_in_flight and feed.read_bytes, feed.cache, a nearer store (docs/how-to/slow.md)",
    "communication": "a larger train.micro_batch, parallel.strategy = zero2 or parallel.shard_workers, a faster network",
    "idle device": "a larger train.micro_batch, parallel.compile, free CPU cores for each worker",
    "compute": "parallel.compile, parallel.precision = bf16, a larger train.micro_batch; train.profile = 5 shows the kernels",
    "memory": "a smaller train.micro_batch, parallel.recompute, parallel.strategy = zero3, more workers",
    "restarts": "a cause of each is in `springtide report`; checkpoint.every_steps = auto, docs/how-to/spot.md",
    "start-up": "a longer run has the same start; a cluster that stays up (RAY_ADDRESS) saves Ray's part of it",
    "straggler": "take the node out of the cluster, or look at its temperature, its power limit and its other programs",
    "saves": "checkpoint.every_steps = auto, checkpoint.when_busy = skip, checkpoint.stage in memory, a faster store",
    "failed saves": "the reason is in the journal; `springtide doctor --store URL` tries the store",
    "capacity": "a smaller elastic.min_workers, more zones or kinds of nodes (docs/how-to/spot.md)",
    "skipped updates": "a smaller optim.peak_lr, a longer optim.warmup, a look at the data of these steps",
    "evaluation": "a larger train.eval_every, a smaller train.eval_tokens, train.eval_async",
    "pauses": "wider limits in train.only_when",
    "device": "nothing is wrong: faster devices, more workers, or a smaller model",
}
"""Name of a finding (something that limits speed) -> remedies to try."""


class Finding(NamedTuple):
    """One thing that limits a run's speed, with numbers and a remedy."""

    name: str
    """Name of the problem, a key of ``REMEDIES``, such as ``start-up``."""
    share: float
    """Largest share of the run's worker-time that a fix could save, from 0 to 1. For ``device``, which needs no fix: the
    goodput (share of time in new steps)."""
    text: str
    """The finding in words, with its most important numbers."""
    evidence: dict[str, float | int | str]
    """Name -> value of the numbers behind ``text``. A name ends in the unit."""
    remedy: str
    """Settings that help, and pages of the documentation."""

    def describe(self) -> str:
        """Return the finding as one line of text for users."""
        share = f", {self.share:.1%} of the time" if self.share > 0 else ""
        return f"{self.name}{share}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What limits a run's speed."""

    step: int
    """The last step that was trained; 0 before the first step."""
    held: float
    """Time for which the run has held workers so far, summed over workers [worker-seconds]."""
    goodput: float
    """Share of the time ``held`` that went into new steps, from 0 to 1."""
    spent: dict[str, float]
    """Category of time, such as ``evaluation`` (see ``Ledger.spent``) -> its share of the time ``held``, the largest first.
    Categories without time are left out."""
    findings: list[Finding]
    """The findings, the most costly first. If nothing limits the run but its device, only the finding ``device``. Before the
    first step it may be empty."""
    not_measured: list[str]
    """Quantities for which the journal has no numbers, each as text, with the setting that would measure it if there is one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, as ``springtide run status --json`` prints it."""
        return {**dataclasses.asdict(self), "findings": [one._asdict() for one in self.findings]}


class DiagnosisBuilder:
    """Updates a diagnosis of a run event by event, in the order of the journal. It stores only the newest steps."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.book = LedgerBuilder(prices or Prices())
        self.last: StepDone | None = None
        """Event of the last step; None before the first step."""
        self.started: Started | None = None
        """Event of the last start of a worker group; None before the first start."""
        self.recent: deque[StepDone] = deque(maxlen=_RECENT_STEPS)
        """The newest steps, whose medians (such as of MFU) describe the present speed."""
        self._num_steps = self._num_skipped = 0
        self._skipped_s = self._paused_s = self._stall_s = self._longest_stall_s = 0.0
        self._counts: Counter[str] = Counter()
        """Kind of event -> number of events."""
        self._failures: Counter[str] = Counter()
        self._failed_save: SaveFailed | None = None
        self._profile: Profiled | None = None
        self._waited: Waited | None = None
        self._slow: dict[tuple[int, str], float] = {}
        """(rank, node) of each straggler (slow rank) of the current worker group -> its speed as a fraction of the other ranks'
        median."""
        self._slow_s: dict[tuple[int, str], float] = {}
        """(rank, node) of each straggler (slow rank) -> time that the whole group has waited for it [worker-seconds]."""
        self._out_of_room = ""
        """Reason of the last decision to wait for capacity (free nodes); empty without one."""

    def take(self, timeline: Timeline) -> list[Event]:
        """Add the events of a part of a journal. Return them in a shorter form with the same ledger (``Timeline.condensed``):
        a million consecutive steps become a few events."""
        events = timeline.condensed(whole=_RECENT_STEPS, newest=self.book.newest)
        self._num_steps += len(timeline.tries) - sum(isinstance(event, StepDone) for event in events)
        for event in events:
            self.add(event)
        return events

    def add(self, event: Event) -> None:
        """Update the diagnosis with one event of the run."""
        self.book.add(event)
        match event:
            case StepDone():
                self._step(event)
                return
            case Started():
                self.started, self._waited, self._slow = event, None, {}
            case Straggling():
                self._slow[event.rank, event.node] = min(1.0, max(0.0, event.share))
            case Saved():
                self._stall_s += event.stall_s
                self._longest_stall_s = max(self._longest_stall_s, event.stall_s)
            case SaveFailed():
                self._failed_save = event
            case Failed():
                self._failures[event.cause] += 1
            case Profiled():
                self._profile = event
            case Waited():
                self._waited = event
            case Resumed():
                self._paused_s += event.paused_s * (self.last.world_size if self.last else 0)
            case Decided() if event.decision == "stay" and "waiting" in event.reason:
                self._out_of_room = event.reason
        self._counts[event.kind] += 1

    def _step(self, event: StepDone) -> None:
        self._num_steps += 1
        if not event.updated:
            self._num_skipped += 1
            self._skipped_s += event.step_time_s * event.world_size
        self.last = event
        self.recent.append(event)
        slowest = min(self._slow.items(), key=lambda item: item[1], default=None)
        if slowest is not None:  # all ranks wait for the slowest rank only, so the other stragglers cost nothing more
            lost_s = (event.step_time_s - event.data_wait_s) * event.world_size * (1.0 - slowest[1])
            self._slow_s[slowest[0]] = self._slow_s.get(slowest[0], 0.0) + max(0.0, lost_s)

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis after the events so far."""
        book = self.book.ledger()
        step = self.last.step if self.last else 0
        if not book.held > 0:
            return Diagnosis(step, 0.0, 0.0, {}, self._before_steps(), [])
        measures = [self._data, self._profiled, self._compute, self._restarts, self._stragglers]
        measures += [self._saves, self._skipped, self._shares]
        found = [finding for measure in measures for finding in measure(book)]
        found.sort(key=lambda one: (-one.share, one.name))
        if not any(one.share > 0 for one in found) and self.last:
            found.append(self._device(book))
        kinds = sorted(book.spent.items(), key=lambda item: -item[1])
        shares = {kind: seconds / book.held for kind, seconds in kinds if seconds > 0}
        return Diagnosis(step, book.held, book.goodput, shares, found, self._not_measured())

    def _before_steps(self) -> list[Finding]:
        if not self._out_of_room:
            return []
        text = f"no step yet: {self._out_of_room[:_SHOWN]}"
        return [Finding("capacity", 1.0, text, {"reason": self._out_of_room[:_SHOWN]}, REMEDIES["capacity"])]

    def _data(self, book: Ledger) -> list[Finding]:
        share = book.spent["data_stall"] / book.held
        waits, times = _median(one.data_wait_s for one in self.recent), _median(one.step_time_s for one in self.recent)
        now = waits / times if times else 0.0
        if share < _DATA and now < _DATA:
            return []
        evidence = {"data_wait_s": waits, "step_time_s": times, "share_of_recent_step": now}
        text = f"the median step waits {waits:.3g} s of {times:.3g} s for its batch (last {len(self.recent)} steps)"
        each = self._waited.data_waits_s if self._waited else []
        if len(each) > 1 and all(map(math.isfinite, each)):
            longest, usual = max(each), statistics.median(sorted(each)[:-1])
            if longest > _SLOW_READER * usual:
                rank = each.index(longest)
                text += (
                    f"; rank {rank}{self._node_of(rank)} waits longest, {longest:.3g} s in all, others {usual:.3g} s"
                )
                evidence |= {"rank": rank, "rank_wait_s": longest, "median_wait_of_others_s": usual}
        return [_finding("data", share, text, evidence)]

    def _profiled(self, book: Ledger) -> list[Finding]:
        if self._profile is None:
            return []
        computing = (book.spent["productive"] + book.spent["recomputed"]) / book.held
        found = []
        for name, kind, limit, what in (
            ("communication", "communication", _COMMUNICATION, "ranks exchange data and compute nothing"),
            ("idle device", "waiting", _IDLE, "the device has nothing to do"),
        ):
            part = self._profile.shares.get(kind, 0.0)
            if part > limit:
                text = f"{what} in {part:.0%} of a profiled step; {limit:.0%} is usual at most"
                evidence = {"share_of_step": part, "limit": limit, "profiled_step": self._profile.step}
                found.append(_finding(name, part * computing, text, evidence))
        return found

    def _compute(self, book: Ledger) -> list[Finding]:
        mfu = self._mfu()
        if not 0 < mfu < _LOW_MFU:
            return []
        computing = (book.spent["productive"] + book.spent["recomputed"]) / book.held
        share = computing * (1 - mfu / _REACHED_MFU)
        source = self.started.peak_source if self.started else ""
        text = (
            f"MFU is {mfu:.1%} while it computes, waits for data excluded; large dense models reach {_REACHED_MFU:.0%}, a "
            f"small one does not fill a device (peak: {source[:_SHOWN] or 'source unknown'})"
        )
        evidence = {"mfu": mfu, "reached_mfu": _REACHED_MFU, "peak_source": source[:_SHOWN]}
        return [_finding("compute", share, text, evidence)]

    def _mfu(self) -> float:
        """Return the median MFU of the recent steps, computed without their waits for data; NaN if the device's peak is not
        known."""
        each = (
            one.mfu * one.step_time_s / (one.step_time_s - one.data_wait_s)
            for one in self.recent
            if one.mfu <= 1.0 and one.step_time_s > one.data_wait_s
        )
        return _median(each) or math.nan

    def _restarts(self, book: Ledger) -> list[Finding]:
        lost = book.spent["resize"] + book.spent["recomputed"]
        found = []
        if book.restarts and lost / book.held >= _RESTARTS:
            gaps: Counter[str] = Counter()
            for one in book.restarts:
                gaps[one.cause.partition(":")[0][:_SHOWN] or "unknown"] += max(1, round(one.gap_s))
            [(cause, gap_s), *_] = gaps.most_common(1)
            again = sum(one.steps_lost for one in book.restarts if one.steps_lost > 0)
            text = (
                f"{len(book.restarts)} restarts cost {lost:.0f} worker-seconds, {again} steps trained again; most time went "
                f"to {cause!r}, about {gap_s} s without a step"
            )
            evidence = {"restarts": len(book.restarts), "steps_lost": again, "cause": cause, "cause_s": gap_s}
            evidence["recomputed_worker_s"] = book.spent["recomputed"]
            found.append(_finding("restarts", lost / book.held, text, evidence))
        if times := self._failures["out of memory"]:
            share = sum(one.gap_s * one.workers_after for one in book.restarts if one.cause.startswith("out of memory"))
            most = max((one.memory_bytes for one in self.recent), default=0)
            text = f"{times} worker group{'s' * (times > 1)} ended out of memory; rank 0 now peaks at {most / 2**30:.2f} GiB"
            found.append(_finding("memory", share / book.held, text, {"failures": times, "memory_bytes": most}))
        return found

    def _stragglers(self, book: Ledger) -> list[Finding]:
        speeds = {(one.rank, one.node): one.share for one in book.stragglers}
        slowest = sorted(self._slow_s.items(), key=lambda item: -item[1])[:_MOST_NAMED]
        return [
            _finding(
                "straggler",
                lost_s / book.held,
                f"rank {rank}{f' on node {node[:8]}' if node else ''} had {speeds[rank, node]:.0%} of the others' speed, and "
                f"all waited for it, {lost_s:.0f} worker-seconds",
                {"rank": rank, "node": node, "speed": speeds[rank, node], "lost_worker_s": lost_s},
            )
            for (rank, node), lost_s in slowest
        ]

    def _saves(self, book: Ledger) -> list[Finding]:
        share, saves, found = book.spent["checkpoint_stall"] / book.held, self._counts[Saved.kind], []
        if share >= _SAVES and saves:
            text = (
                f"training stood still {book.spent['checkpoint_stall']:.0f} worker-seconds between steps, around {saves} "
                f"saves; the longest wait for one was {self._longest_stall_s:.2f} s"
            )
            evidence = {"saves": saves, "stall_s": self._stall_s, "longest_stall_s": self._longest_stall_s}
            found.append(_finding("saves", share, text, {**evidence, "skipped": self._counts[SaveSkipped.kind]}))
        if self._failed_save is not None:
            failed = self._counts[SaveFailed.kind]
            reason = self._failed_save.reason[:_SHOWN]
            text = f"{failed} of {failed + saves} saves failed, the last at step {self._failed_save.step}: {reason}"
            found.append(_finding("failed saves", 0.0, text, {"failed": failed, "saves": saves, "reason": reason}))
        return found

    def _skipped(self, book: Ledger) -> list[Finding]:
        if not self._num_steps or self._num_skipped / self._num_steps < _SKIPPED:
            return []
        counts = {"skipped": self._num_skipped, "steps": self._num_steps, "spikes": self._counts[Spiked.kind]}
        text = f"{self._num_skipped} of {self._num_steps} steps changed no weight: their gradient was not finite, or a spike"
        evidence = {**counts, "rollbacks": self._counts[RolledBack.kind]}
        return [_finding("skipped updates", self._skipped_s / book.held, text, evidence)]

    def _shares(self, book: Ledger) -> list[Finding]:
        """Return a finding for each category with a large share of time: start-up, capacity, evaluation, pauses."""
        phases = dict(self.started.phases_s) if self.started else {}
        phases.pop("rendezvous", None)  # not start-up, but the time since the previous group
        longest = max(phases, key=lambda name: phases[name], default="")
        phase = f", of which {longest[:40]} took longest, {phases[longest]:.1f} s" if longest else ""
        in_workers = f"the workers' own part of the last start was {sum(phases.values()):.1f} s{phase}"
        start = f"before the first step of each driver: Ray, new processes, then the model; {in_workers}"
        room = f": {self._out_of_room[:_SHOWN]}" if self._out_of_room else ""
        evaluations = self._counts["evaluated"]
        rows = (
            ("start-up", book.spent["start_up"], _START_UP, start),
            ("capacity", book.spent["waiting"], _WAITING, f"no worker group, for want of capacity{room}"),
            (
                "evaluation",
                book.spent["evaluation"],
                _EVALUATION,
                f"{evaluations} evaluations that training waited for",
            ),
            ("pauses", self._paused_s, _PAUSED, f"{self._counts[Resumed.kind]} pauses by train.only_when"),
        )
        return [
            _finding(name, spent / book.held, f"{spent:.0f} worker-seconds {text}", {"worker_s": spent})
            for name, spent, limit, text in rows
            if spent / book.held >= limit
        ]

    def _device(self, book: Ledger) -> Finding:
        mfu = self._mfu()
        shown = f"MFU {mfu:.0%} while it computes" if mfu == mfu else "MFU unknown: the device's peak is not known"
        text = f"nothing else holds it up, {shown}"
        return _finding("device", book.goodput, text, {"goodput": book.goodput} | ({"mfu": mfu} if mfu == mfu else {}))

    def _not_measured(self) -> list[str]:
        found = []
        if self._profile is None and self.last:
            found.append("communication: no profile in the journal; train.profile = 5 measures it")
        if self.recent and math.isnan(self._mfu()):
            found.append("compute: the peak of this device is not known")
        return found

    def _node_of(self, rank: int) -> str:
        nodes = self.started.nodes if self.started else []
        return f" on node {nodes[rank][:8]}" if rank < len(nodes) else ""


def _finding(name: str, share: float, text: str, evidence: dict[str, Any]) -> Finding:
    return Finding(name, min(1.0, max(0.0, share)), text, evidence, REMEDIES[name])


def _median(values: Iterable[float]) -> float:
    """Return the median of the ``values`` that are neither infinite nor NaN; 0 if there are none."""
    finite = [one for one in values if math.isfinite(one)]
    return statistics.median(finite) if finite else 0.0
