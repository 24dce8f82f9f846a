"""What is said of a run's speed: findings with their numbers and remedies, as values. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

REMEDIES = {
    "data": "feed.reads_in_flight and feed.read_bytes, feed.cache, a nearer store (docs/how-to/slow.md)",
    "communication": "a larger train.micro_batch, parallel.strategy = zero2 or parallel.shard_workers, a faster network",
    "idle device": "a larger train.micro_batch, parallel.compile, free CPU cores for each worker",
    "compute": "parallel.compile, parallel.precision = bf16, a larger train.micro_batch; train.profile = 5 shows the kernels",
    "memory": "a smaller train.micro_batch, parallel.recompute, parallel.strategy = zero3, more workers",
    "restarts": "a cause of each is in `springtide report`; checkpoint.every_steps = auto, docs/how-to/spot.md",
    "start-up": "nothing if the run is short; the longest phase is named here, and a longer run has the same start",
    "straggler": "take the node out of the cluster, or look at its temperature, its power limit and its other programs",
    "saves": "checkpoint.every_steps = auto, checkpoint.when_busy = skip, checkpoint.stage in memory, a faster store",
    "failed saves": "the reason is in the journal; `springtide doctor --store URL` tries the store",
    "capacity": "a smaller elastic.min_workers, more zones or kinds of nodes (docs/how-to/spot.md)",
    "skipped updates": "a smaller optim.peak_lr, a longer optim.warmup, a look at the data of these steps",
    "evaluation": "a larger train.eval_every, a smaller train.eval_tokens, train.eval_async",
    "pauses": "wider limits in train.only_when",
    "device": "nothing is wrong: faster devices, more workers, or a smaller model",
}
"""Name of a finding -> what to try."""


class Finding(NamedTuple):
    """One thing that limits a run."""

    name: str
    """``data``, ``communication``, ``idle device``, ``compute``, ``memory``, ``restarts``, ``start-up``, ``straggler``,
    ``saves``, ``failed saves``, ``capacity``, ``skipped updates``, ``evaluation``, ``pauses`` or ``device``."""
    share: float
    """At most this share of the run's worker-time would be won without it, from 0 to 1; for ``device``, of new steps."""
    text: str
    """What was found."""
    evidence: dict[str, float | int | str]
    """The numbers behind it; units are in their names."""
    remedy: str
    """Settings and pages that help."""

    def describe(self) -> str:
        """Return the finding as one line for people."""
        share = f", {self.share:.1%} of the time" if self.share > 0 else ""
        return f"{self.name}{share}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What limits a run."""

    step: int
    """The step last trained; 0 before the first."""
    held: float
    """Time held so far [worker-seconds]."""
    goodput: float
    """Productive time / time held, from 0 to 1."""
    findings: list[Finding]
    """The most costly first. Only ``device`` if nothing is wrong; empty before the first step if nothing is known yet."""
    not_measured: list[str]
    """What the journal cannot tell, and the setting that measures it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, as ``springtide run why --json`` prints it."""
        return {**dataclasses.asdict(self), "findings": [one._asdict() for one in self.findings]}
