"""What NVIDIA's profilers see of profiled steps: the capture's begin and end, and named ranges.

``nsys profile --capture-range=cudaProfilerApi`` records from ``start`` to ``stop``; ranges (NVTX) name what it shows:

    step 5               one range for each profiled step
        compute          forward, backward, and the step's all-reduce
        update           clipping and the optimizer
    between steps        events, saves, snapshots, and the wait for the next batch
"""

from __future__ import annotations

from typing import Protocol

import torch


class Tools(Protocol):
    """Where capture and ranges go."""

    def start(self) -> None:
        """Begin the capture."""

    def stop(self) -> None:
        """End the capture."""

    def push(self, name: str) -> None:
        """Begin a range within those that are open."""

    def pop(self) -> None:
        """End the newest range."""


class NvidiaTools:
    """The driver's profiler switch and NVTX. Without a profiler attached, both do next to nothing."""

    def start(self) -> None:
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.profiler.stop()

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


def tools_of(device: torch.device) -> Tools | None:
    """Return the tools of a device; None where there are none: on CPUs, and on GPUs of another maker."""
    return NvidiaTools() if device.type == "cuda" and torch.version.hip is None else None


class StepRanges:
    """Capture and ranges of some steps; without tools, nothing."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools, self._open, self._captures = tools, 0, False

    def begin(self) -> None:
        """Begin the capture, between two steps."""
        if self._tools is not None:
            self._captures = True
            self._tools.start()
            self._enter("between steps")

    def before_step(self, step: int) -> None:
        """Begin the step after which ``step`` steps are done."""
        self._leave()
        self._enter(f"step {step}", "compute")

    def before_update(self) -> None:
        """Begin the part of the step that changes the weights."""
        self._leave(to=1)
        self._enter("update")

    def after_step(self) -> None:
        """End the step."""
        self._leave()
        self._enter("between steps")

    def end(self) -> None:
        """End ranges and capture, whatever is open."""
        self._leave()
        if self._tools is not None and self._captures:
            self._tools.stop()
        self._captures = False

    def _enter(self, *names: str) -> None:
        if self._tools is not None and self._captures:
            for name in names:
                self._tools.push(name)
                self._open += 1

    def _leave(self, to: int = 0) -> None:
        while self._tools is not None and self._open > to:
            self._tools.pop()
            self._open -= 1
