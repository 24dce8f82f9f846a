"""What happens in a run, as values. The loop yields them; everything that prints, stores or plots listens.

``record`` turns an event into one flat JSON object, ``event`` turns it back. Unknown keys are an error: a journal of
another version is not guessed at.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str]
    time_s: float = dataclasses.field(default_factory=time.time)
    """When, seconds since 1970."""
    term: int = 0
    """Which start of the driver wrote this; the first is 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A group of workers stands and is about to train from ``step``."""

    kind: ClassVar[str] = "started"
    step: int
    world_size: int
    resumed_from: str = ""
    """Name of the checkpoint it came from; empty at the beginning."""
    order_identity: str = ""
    num_parameters: int = 0
    flops_per_token: float = 0.0
    """Of the model, forward and backward."""
    hardware_flops_per_token: float = 0.0
    """The same with what is computed again in backward."""
    peak_flops: float = 0.0
    """FLOP/s of one worker's device, the denominator of MFU."""
    peak_source: str = ""
    """Where ``peak_flops`` came from, in words."""
    remark: str = ""
    """What a person should know of this start, in words."""
    nodes: list[str] = dataclasses.field(default_factory=list)
    """Where each rank is; empty where that is not known."""
    markets: list[str] = dataclasses.field(default_factory=list)
    """``spot`` or whatever else the labels of each rank's node say of its market; empty where they say nothing."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """What rank 0 took for each thing it did since it was told to train [s]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step. ``step`` counts from 1; ``tokens`` is what the run has seen after it."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_tokens: int
    step_time_s: float
    data_wait_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: int
    world_size: int
    digest: str
    """16 hex digits over the sample ids that were consumed, all ranks."""
    updated: bool = True
    """Whether the weights have changed; not where a gradient was infinite or no number, or a spike."""
    loss_scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spiked(Event):
    """A step's loss or gradient norm was far above those of the steps before."""

    kind: ClassVar[str] = "spiked"
    step: int
    what: str
    value: float
    usual: float
    deviations: float
    left_out: bool
    """Whether the weights are those of before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The run goes back to a checkpoint before a spike; what it starts from is told next."""

    kind: ClassVar[str] = "rolled_back"
    step: int
    """The spike's."""
    skipped: list[int]
    """Steps of the order that are jumped over from now on."""
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    kind: ClassVar[str] = "evaluated"
    step: int
    heldout_loss: float
    """Nats per token."""
    heldout_bits_per_byte: float
    rows: int
    corpora: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte of each corpus alone."""
    asynchronous: bool = False
    """Whether training went on meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Event):
    kind: ClassVar[str] = "saved"
    step: int
    name: str
    size_bytes: int
    """Of the state."""
    save_time_s: float
    """From its beginning until it was committed; training went on meanwhile."""
    written_bytes: int = 0
    """What of it had changed, and was written."""
    stall_s: float = 0.0
    """How long training waited for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    kind: ClassVar[str] = "save_failed"
    step: int
    reason: str
    in_a_row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event):
    """A save was due and left out."""

    kind: ClassVar[str] = "save_skipped"
    step: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveIntervalChanged(Event):
    """From now on a save is begun every so often."""

    kind: ClassVar[str] = "cadence"
    step: int
    every_s: float
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotIntervalChanged(Event):
    """From now on a snapshot in memory is taken every so often."""

    kind: ClassVar[str] = "snapshots"
    step: int
    every_steps: int
    """0: no more of them."""
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected(Event):
    """A checkpoint whose bytes are bad was put in quarantine."""

    kind: ClassVar[str] = "rejected"
    step: int
    """Where the run goes on instead."""
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waited(Event):
    """The wait for data by rank, told at every save."""

    kind: ClassVar[str] = "waited"
    step: int
    data_waits_s: list[float]
    """Of each rank, since this group of workers began [s]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggling(Event):
    """A rank's device was far slower than the others', twice in a row: all wait for it."""

    kind: ClassVar[str] = "straggling"
    step: int
    rank: int
    node: str
    share: float
    """Of the median speed of the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Where the time of rank 0 went in the steps up to this one."""

    kind: ClassVar[str] = "profiled"
    step: int
    bound_by: str
    """The kind that took most: ``arithmetic``, ``memory``, ``communication``, ``input`` or ``waiting``."""
    shares: dict[str, float]
    """Of the time, by kind."""
    top: dict[str, float]
    """Operation -> its share."""
    advice: str
    trace: str
    """Where the trace is, for chrome://tracing or Perfetto."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something that stops nothing and that a person should know of."""

    kind: ClassVar[str] = "warned"
    step: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    kind: ClassVar[str] = "sampled"
    step: int
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided(Event):
    """What was decided of the size of the run: ``start``, ``leave``, ``replace`` or ``stay``."""

    kind: ClassVar[str] = "decided"
    step: int
    decision: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left(Event):
    """A group of workers brought its state to safety, for another to go on."""

    kind: ClassVar[str] = "left"
    step: int
    kept_in: str
    """``memory`` or ``store``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A group of workers ended by a failure."""

    kind: ClassVar[str] = "failed"
    step: int
    cause: str
    """``lost nodes``, ``failed workers``, ``start-up``, ``hung`` or ``given up``."""
    reason: str
    again: bool
    """Whether another is started."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """A new worker's process stands on a node, and can be used by the next group."""

    kind: ClassVar[str] = "ready"
    step: int
    node: str
    took_s: float
    """Since it was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """Training ended: ``finished``, ``stopped`` (asked to) or ``failed``."""

    kind: ClassVar[str] = "stopped"
    step: int
    status: str
    reason: str = ""


_KINDS = (
    *(Started, StepDone, Spiked, RolledBack, Waited, Straggling, Evaluated, Sampled, Profiled, Warned, Stopped),
    *(Saved, SaveFailed, SaveSkipped, SaveIntervalChanged, SnapshotIntervalChanged, Rejected),
    *(Decided, Left, Failed, Ready),
)
EVENTS: dict[str, type[Event]] = {event.kind: event for event in _KINDS}


def record(event: Event) -> dict[str, Any]:
    """The event as a flat JSON object."""
    return {"kind": event.kind, **dataclasses.asdict(event)}


def event(record: dict[str, Any]) -> Event:
    """The event that ``record`` was made from; KeyError for a kind, TypeError for a key that is not known."""
    values = dict(record)
    return EVENTS[values.pop("kind")](**values)
