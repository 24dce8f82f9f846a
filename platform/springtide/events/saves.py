"""Events of checkpoints and snapshots."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from springtide.config.steps import StepsDone
from springtide.events.event import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint was committed: it is complete, and the run can resume from it."""

    kind: ClassVar[str] = "saved"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    name: str
    size_bytes: int
    """Size of the whole training state."""
    save_time_s: float
    """Time from the start of the save to its commit; training continues meanwhile."""
    written_bytes: int = 0
    """Bytes that this save wrote. The rest was unchanged since an earlier checkpoint, which the new one refers to."""
    stall_s: float = 0.0
    """How long training stood still for the save, in seconds."""

    def describe(self) -> str:
        size = f"{self.size_bytes / 2**20:.1f} MiB"
        if self.written_bytes < self.size_bytes:
            size += f" ({self.written_bytes / 2**20:.1f} MiB new)"
        waited = f", training waited {self.stall_s:.2f} s"
        return f"step {self.step}: saved {self.name}, {size} in {self.save_time_s:.2f} s{waited}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint could not be written; training continues."""

    kind: ClassVar[str] = "save_failed"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    reason: str
    in_a_row: int

    def describe(self) -> str:
        return f"step {self.step}: THE SAVE FAILED ({self.in_a_row} in a row): {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event):
    """A save was due, but it was skipped."""

    kind: ClassVar[str] = "save_skipped"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    reason: str

    def describe(self) -> str:
        return f"step {self.step}: save skipped: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveIntervalChanged(Event):
    """The interval between saves changed."""

    kind: ClassVar[str] = "cadence"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    every_s: float
    reason: str

    def describe(self) -> str:
        return f"step {self.step}: saving every {self.every_s:.0f} s: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotIntervalChanged(Event):
    """The interval between snapshots in memory changed."""

    kind: ClassVar[str] = "snapshots"
    charged_to: ClassVar[str] = "checkpoint_stall"
    step: StepsDone
    every_steps: int
    """Steps between two snapshots; 0 if snapshots are switched off for now."""
    reason: str

    def describe(self) -> str:
        often = f"every {self.every_steps} steps" if self.every_steps else "OFF"
        return f"step {self.step}: snapshots in memory {often}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected(Event):
    """A damaged checkpoint was put in quarantine: the run no longer resumes from it."""

    kind: ClassVar[str] = "rejected"
    step: StepsDone
    """Step of the older state that the run resumes from instead."""
    name: str
    reason: str

    def describe(self) -> str:
        return f"step {self.step}: {self.name} is put in quarantine, resuming from this step: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left(Event):
    """A worker group saved its state and ended early, such as for a changed number of workers. The next group resumes."""

    kind: ClassVar[str] = "left"
    charged_to: ClassVar[str] = "resize"
    step: StepsDone
    kept_in: str
    """Where the state was saved: ``memory`` (of nodes) or ``store`` (disk or object storage)."""

    def describe(self) -> str:
        return (
            f"step {self.step}: saved in {'the store' if self.kept_in == 'store' else 'memory'}; another group resumes"
        )
