"""Events of training: worker groups, steps, spikes, evaluations, the end."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from springtide.config.steps import OrderStep, StepsDone
from springtide.events.event import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A worker group is set up and is about to train from ``step``."""

    kind: ClassVar[str] = "started"
    step: StepsDone
    world_size: int
    resumed_from: str = ""
    """Name of the checkpoint that the worker group loaded; empty at the beginning of the run."""
    order_identity: str = ""
    chain: str = ""
    """The chain (hash over all trained steps) of the state that training continues from, 32 hex digits; empty at step 0."""
    skipped_updates: list[OrderStep] = dataclasses.field(default_factory=list)
    """Steps whose update was skipped in the history of that state, as indexes in the order of batches; at most the newest
    1000."""
    num_parameters: int = 0
    flops_per_token: float = 0.0
    """FLOPs of the model per token, forward and backward."""
    hardware_flops_per_token: float = 0.0
    """``flops_per_token`` plus recomputation in backward."""
    peak_flops: float = 0.0
    """FLOP/s of one worker's device, the denominator of MFU."""
    peak_source: str = ""
    """Source of ``peak_flops``, as text."""
    remark: str = ""
    """Remarks for the user on the start of this worker group."""
    nodes: list[str] = dataclasses.field(default_factory=list)
    """The node of each rank; empty if unknown."""
    markets: list[str] = dataclasses.field(default_factory=list)
    """Market type of each rank's node according to its labels, such as ``spot``; empty if there is no label."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Phase of rank 0's start-up -> its time. If rank 0's process belonged to an earlier group, the first phase is
    ``rendezvous``: the time since it left that group [s]."""
    energy_source: str = ""
    """How the energy of the group's steps is measured, as text (``training/energy.py``); empty if it is not."""

    @property
    def where(self) -> str:
        """The group's number of workers and nodes, and their market types, as text."""
        nodes, markets = len(set(self.nodes)), sorted({one for one in self.markets if one})
        on_nodes = f"{_workers(self.world_size)}" + (f" on {nodes} node{'s' * (nodes != 1)}" if nodes else "")
        return ", ".join((on_nodes, *markets))

    def describe(self) -> str:
        where = f"from step {self.step} ({self.resumed_from})" if self.resumed_from else "from the beginning"
        size = f"{self.num_parameters / 1e6:.1f}M parameters"
        peak = f"peak {self.peak_flops / 1e9:,.0f} GFLOP/s per worker"
        return "; ".join(filter(None, (f"{_workers(self.world_size)}, {where}", f"{size}, {peak}", self.remark)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step. ``step`` counts from 1; ``tokens`` is the number of tokens that the run has trained on after it."""

    kind: ClassVar[str] = "step"
    step: StepsDone
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
    """16 hex digits over the sample ids that all ranks consumed."""
    updated: bool = True
    """Whether the weights were updated; False if a gradient was infinite or NaN, or the step was skipped as a spike."""
    loss_scale: float = 1.0
    energy_j: float = 0.0
    """Energy that all ranks used since the previous step, or since their group began; 0 if it is not measured [J]."""
    energy_between_j: float = 0.0
    """The part of ``energy_j`` used between the two steps: evaluations, saves, waits for data [J]."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics that only some runs report, see ``events.metrics.EXTRA_METRICS``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitored(Event):
    """The state of rank 0's GPU, every 30 s or so. A figure that NVML does not report is None."""

    kind: ClassVar[str] = "monitored"
    step: StepsDone
    utilisation: float | None = None
    """Fraction of the time, over the last second or less, in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    """Degrees Celsius."""
    clock_mhz: float | None = None
    """Clock of the GPU's multiprocessors [MHz]."""
    xids: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the critical errors (XID) that the GPU's driver reported since the previous ``Monitored`` event."""

    def describe(self) -> str:
        figures = (
            ("XID", " and ".join(map(str, self.xids)) or None, "{}"),
            ("busy", self.utilisation, "{:.0%}"),
            ("memory", self.memory_used_bytes and self.memory_used_bytes / 2**30, "{:.1f} GiB"),
            ("power", self.power_w, "{:.0f} W"),
            ("temperature", self.temperature_c, "{:.0f} degrees"),
            ("clock", self.clock_mhz, "{:.0f} MHz"),
        )
        told = ", ".join(f"{name} {form.format(value)}" for name, value, form in figures if value is not None)
        return f"step {self.step}: GPU of rank 0: {told}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spiked(Event):
    """A step's loss or gradient norm was far above those of the preceding steps."""

    kind: ClassVar[str] = "spiked"
    step: StepsDone
    what: str
    value: float
    usual: float
    deviations: float
    left_out: bool
    """Whether the update was skipped."""

    def describe(self) -> str:
        done = "the update is skipped" if self.left_out else "the update is applied"
        usual = f"{self.value:.4g} instead of {self.usual:.4g}, {self.deviations:.0f} deviations"
        return f"step {self.step}: {self.what} {usual}; {done}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The run rolls back to a checkpoint before a spike; the next ``Started`` event names the checkpoint."""

    kind: ClassVar[str] = "rolled_back"
    charged_to: ClassVar[str] = "resize"
    step: StepsDone
    """Steps done when the spike was found; the last of them is the spike."""
    skipped: list[OrderStep]
    """Steps that are newly jumped over, as indexes in the order of batches."""
    reason: str

    def describe(self) -> str:
        steps = ", ".join(map(str, self.skipped))
        return f"step {self.step}: ROLLED BACK, {self.reason}; steps {steps} of the order are jumped over from now on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miscomputed(Event):
    """Devices computed different results for the same micro-batch. States since the devices last agreed are abandoned and the
    worker group ends; the next group resumes from an earlier state."""

    kind: ClassVar[str] = "miscomputed"
    charged_to: ClassVar[str] = "other"
    step: StepsDone
    """The step that was checked."""
    ranks: list[int]
    """Ranks whose device computed wrong results; empty if the devices disagree and no rank can be blamed."""
    nodes: list[str]
    """Node of each rank in ``ranks`` or, if that is empty, of each rank that disagrees; empty if the nodes are unknown."""
    agreed_step: StepsDone
    """Steps done when all devices last agreed."""
    reason: str

    def describe(self) -> str:
        what = "WRONG RESULTS" if self.ranks else "DEVICES DISAGREE"
        return f"step {self.step}: {what}: {self.reason}; states after step {self.agreed_step} are abandoned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waited(Event):
    """Each rank's wait for data, reported at every save."""

    kind: ClassVar[str] = "waited"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    data_waits_s: list[float]
    """Wait of each rank since this worker group started [s]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """Training waits after a step, because the machine does not fulfil ``train.only_when``."""

    kind: ClassVar[str] = "paused"
    step: StepsDone
    reason: str
    until: str
    """Condition that ends the pause, as text."""

    def describe(self) -> str:
        return f"step {self.step}: PAUSED, {self.reason}; until {self.until}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A pause has ended."""

    kind: ClassVar[str] = "resumed"
    step: StepsDone
    paused_s: float
    """Length of the pause [s]."""
    asked: bool = False
    """Whether the pause ended early, because of a request to save, stop or leave."""

    def describe(self) -> str:
        why = ", because of a request" if self.asked else ""
        return f"step {self.step}: resumes after a pause of {self.paused_s:.0f} s{why}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggling(Event):
    """A rank's device was far slower than the other ranks' devices in two speed checks in a row. All ranks wait for it."""

    kind: ClassVar[str] = "straggling"
    step: StepsDone
    rank: int
    node: str
    share: float
    """Speed of this rank's device over the median speed of the others."""

    def describe(self) -> str:
        where = f" on node {self.node[:8]}" if self.node else ""
        return f"step {self.step}: rank {self.rank}{where} is slow, {self.share:.0%} of the others' speed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Losses on the held-out sets of a run."""

    kind: ClassVar[str] = "evaluated"
    charged_to: ClassVar[str] = "evaluation"
    step: StepsDone
    heldout_loss: float
    """Loss in nats per token, with the corpora weighted as in the mixture."""
    heldout_bits_per_byte: float
    rows: int
    ema_heldout_loss: float | None = None
    """``heldout_loss`` of the averaged weights; None if there are none."""
    tokens: int = 0
    """Number of tokens that were predicted in these rows."""
    corpora: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name of a held-out set -> its bits per byte."""
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name of a held-out set -> its loss in nats per token."""
    forgetting: dict[str, float] = dataclasses.field(default_factory=dict)
    """Held-out set of the run whose weights this one started from -> its loss now minus its loss at step 0 [nats/token]."""
    asynchronous: bool = False
    """Whether training continued during the evaluation."""

    @property
    def mean_bits_per_byte(self) -> float:
        """Unweighted mean over the held-out sets, which does not depend on the weights of the mixture."""
        found = list(self.corpora.values()) or [self.heldout_bits_per_byte]
        return math.fsum(found) / len(found)

    def describe(self) -> str:
        each = ", ".join(f"{name} {bits:.3f}" for name, bits in self.corpora.items() if len(self.corpora) > 1)
        figure = f"{self.heldout_bits_per_byte:.3f} bits per byte, loss {self.heldout_loss:.3f}"
        if self.ema_heldout_loss is not None:
            figure += f", of the averaged weights {self.ema_heldout_loss:.3f}"
        worse = ", ".join(f"{name} {loss:+.3f}" for name, loss in self.forgetting.items())
        forgotten = f"; loss since step 0: {worse}" if worse and self.step else ""
        return f"step {self.step}: held-out {figure}" + (f" ({each})" if each else "") + forgotten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """Text that the model wrote after a prompt."""

    kind: ClassVar[str] = "sampled"
    step: int
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """A profile of rank 0 over the steps up to this one."""

    kind: ClassVar[str] = "profiled"
    step: StepsDone
    bound_by: str
    """Kind of work that took most time: ``arithmetic``, ``memory``, ``communication``, ``input`` or ``waiting``."""
    shares: dict[str, float]
    """Kind of work -> its share of the time."""
    top: dict[str, float]
    """Operation -> its share of the time, for those that took most."""
    advice: str
    trace: str
    """Location of the trace, for chrome://tracing or Perfetto. It is written while training continues."""

    def describe(self) -> str:
        each = ", ".join(f"{kind} {share:.0%}" for kind, share in self.shares.items() if share >= 0.005)
        top = ", ".join(f"{name} {share:.0%}" for name, share in self.top.items())
        found = f"bound by {self.bound_by} ({each}; most in {top})"
        return f"step {self.step}: {found}. Try {self.advice}. Trace: {self.trace}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning for the user; the run continues."""

    kind: ClassVar[str] = "warned"
    step: StepsDone
    reason: str

    def describe(self) -> str:
        return f"step {self.step}: WARNING: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """Training ended: ``finished``, ``stopped`` (on request) or ``failed``."""

    kind: ClassVar[str] = "stopped"
    step: int
    status: str
    reason: str = ""

    def describe(self) -> str:
        return f"step {self.step}: {self.status}" + (f": {self.reason}" if self.reason else "")


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"
