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
    """Name of the checkpoint that the worker group loaded, or URL if it is another run's; empty if the weights are new."""
    order_identity: str = ""
    chain: str = ""
    """Chain (hash over all steps that the loaded state was trained on), 32 hex digits; empty before the first step."""
    skipped_updates: list[OrderStep] = dataclasses.field(default_factory=list)
    """Steps in the history of the loaded state that had no weight update, such as spikes. Each is an index in the order of
    batches, from 0. At most the newest 1000."""
    num_parameters: int = 0
    flops_per_token: float = 0.0
    """FLOPs of the model per trained token, forward and backward, without recomputed activations."""
    hardware_flops_per_token: float = 0.0
    """``flops_per_token`` plus the FLOPs of activations that backward recomputes."""
    peak_flops: float = 0.0
    """Peak FLOP/s of one worker's device. MFU is relative to this value."""
    peak_source: str = ""
    """Where the value of ``peak_flops`` comes from, as text."""
    remark: str = ""
    """Remarks for the user about the state that this worker group loaded; empty if there are none."""
    nodes: list[str] = dataclasses.field(default_factory=list)
    """Ray node id of each rank, by rank; empty if unknown."""
    markets: list[str] = dataclasses.field(default_factory=list)
    """Market type of each rank's node from the node's Ray label, such as ``spot``; an empty text for a node without a label."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Phase of rank 0's start-up -> its duration [s]. If rank 0's process also served the previous worker group, the
    first phase is ``rendezvous``: the time since it left the previous group."""
    energy_source: str = ""
    """How the energy of this group's steps is measured, as text (``training/energy.py``); empty if it is not measured."""

    @property
    def where(self) -> str:
        """Number of workers and nodes of the group and their market types as text, such as ``8 workers on 2 nodes, spot``."""
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
    """An optimizer step is done. ``step``: its number, from 1. ``tokens``: tokens that the run has trained on, this step
    included."""

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
    """Digest (checksum) of the ids of all samples that the ranks read in this step, 16 hex digits."""
    updated: bool = True
    """True if the weights were updated; False if a gradient was infinite or NaN, or the update was skipped as a spike."""
    loss_scale: float = 1.0
    energy_j: float = 0.0
    """Energy that all ranks used since the previous step; for a group's first step, since its start; 0 if unknown [J]."""
    energy_between_j: float = 0.0
    """The part of ``energy_j`` used after the previous step and before this one: evaluations, saves, waits for data [J]."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name -> value of each metric that only some runs report; see ``events.metrics.EXTRA_METRICS``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitored(Event):
    """The state of rank 0's GPU, measured about every 30 s. A value that NVIDIA's library NVML does not report is None."""

    kind: ClassVar[str] = "monitored"
    step: StepsDone
    utilisation: float | None = None
    """Share of about the last second during which a kernel ran on the GPU, from 0 to 1."""
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    """Temperature of the GPU in degrees Celsius."""
    clock_mhz: float | None = None
    """Clock rate of the GPU's multiprocessors [MHz]."""
    xids: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the critical GPU errors (NVIDIA's XID codes) since the previous ``Monitored`` event."""

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
    """A spike: a step's loss or gradient norm was far above its values in the preceding steps."""

    kind: ClassVar[str] = "spiked"
    step: StepsDone
    what: str
    value: float
    usual: float
    deviations: float
    left_out: bool
    """True if the weight update of this step was skipped, False if it was applied."""

    def describe(self) -> str:
        done = "the update is skipped" if self.left_out else "the update is applied"
        usual = f"{self.value:.4g} instead of {self.usual:.4g}, {self.deviations:.0f} deviations"
        return f"step {self.step}: {self.what} {usual}; {done}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The run returns to a checkpoint before a spike (step with a far too high loss). The next ``Started`` event names it."""

    kind: ClassVar[str] = "rolled_back"
    charged_to: ClassVar[str] = "resize"
    step: StepsDone
    """Number of steps done when the spike was found. The spike is the last of these steps."""
    skipped: list[OrderStep]
    """Steps that the run skips from now on: the spike, and ``optim.rollback_steps`` steps before it, as indexes in the order of
    batches, from 0."""
    reason: str

    def describe(self) -> str:
        steps = ", ".join(map(str, self.skipped))
        return f"step {self.step}: ROLLED BACK, {self.reason}; steps {steps} of the order are jumped over from now on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miscomputed(Event):
    """Devices computed different results for the same micro-batch. All checkpoints and snapshots after ``agreed_step`` are
    abandoned. The worker group ends, and the next group resumes from an earlier state."""

    kind: ClassVar[str] = "miscomputed"
    charged_to: ClassVar[str] = "other"
    step: StepsDone
    """The step whose micro-batches were computed twice and compared."""
    ranks: list[int]
    """Ranks whose device computed wrong results; empty if the devices disagree but no majority shows which is wrong."""
    nodes: list[str]
    """Node of each rank in ``ranks``. If ``ranks`` is empty: node of each rank that disagrees. Empty if nodes are unknown."""
    agreed_step: StepsDone
    """The last step whose state is known to be good: the step before the last check in which all devices agreed."""
    reason: str

    def describe(self) -> str:
        what = "WRONG RESULTS" if self.ranks else "DEVICES DISAGREE"
        return f"step {self.step}: {what}: {self.reason}; states after step {self.agreed_step} are abandoned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waited(Event):
    """How long each rank has waited for data, reported at every save."""

    kind: ClassVar[str] = "waited"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    data_waits_s: list[float]
    """Total time that each rank has waited for data since its worker group started [s], by rank."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """Training pauses after a step, because the machine does not meet the condition ``train.only_when``."""

    kind: ClassVar[str] = "paused"
    step: StepsDone
    reason: str
    until: str
    """Condition that ends the pause, as text for users."""

    def describe(self) -> str:
        return f"step {self.step}: PAUSED, {self.reason}; until {self.until}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A pause because of ``train.only_when`` has ended."""

    kind: ClassVar[str] = "resumed"
    step: StepsDone
    paused_s: float
    """Length of the pause [s]."""
    asked: bool = False
    """True if a request to save, stop or leave ended the pause early."""

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
    """Speed of this rank's device, as a fraction of the median speed of the other ranks' devices."""

    def describe(self) -> str:
        where = f" on node {self.node[:8]}" if self.node else ""
        return f"step {self.step}: rank {self.rank}{where} is slow, {self.share:.0%} of the others' speed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Losses on the run's held-out sets, the data that it does not train on."""

    kind: ClassVar[str] = "evaluated"
    charged_to: ClassVar[str] = "evaluation"
    step: StepsDone
    heldout_loss: float
    """Loss in nats per token: the mean over the held-out sets, weighted like the datasets in the training mixture."""
    heldout_bits_per_byte: float
    rows: int
    ema_heldout_loss: float | None = None
    """``heldout_loss`` of the moving average of the weights; None if ``optim.ema_half_life`` is off."""
    tokens: int = 0
    """Number of tokens whose loss was computed, in all ``rows`` held-out rows together."""
    corpora: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name of a held-out set -> loss on it in bits per byte of text."""
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name of a held-out set -> loss on it in nats per token."""
    forgetting: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name of a held-out set of the base run (whose weights this run started from) -> loss now minus loss at step 0
    [nats/token]."""
    asynchronous: bool = False
    """True if training continued during the evaluation, False if it waited."""

    @property
    def mean_bits_per_byte(self) -> float:
        """Mean bits per byte of all held-out sets, each with equal weight, so that it does not depend on the mixture."""
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
    """A sample: text that the model generated after a prompt."""

    kind: ClassVar[str] = "sampled"
    step: int
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Results of a profile of rank 0, which covers the steps up to ``step``."""

    kind: ClassVar[str] = "profiled"
    step: StepsDone
    bound_by: str
    """Kind of work that took most time: ``arithmetic``, ``memory``, ``communication``, ``input`` or ``waiting``."""
    shares: dict[str, float]
    """Kind of work, as in ``bound_by`` -> its share of the profiled time, from 0 to 1."""
    top: dict[str, float]
    """Operation or kernel -> its share of the profiled time, from 0 to 1. Only the few longest operations."""
    advice: str
    trace: str
    """Path or URL of the trace file for chrome://tracing or Perfetto. The file is written while training continues."""

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
    """Training ended. ``status``: ``finished`` (last step done), ``stopped`` (a user asked for it) or ``failed``."""

    kind: ClassVar[str] = "stopped"
    step: int
    status: str
    reason: str = ""

    def describe(self) -> str:
        return f"step {self.step}: {self.status}" + (f": {self.reason}" if self.reason else "")


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"
