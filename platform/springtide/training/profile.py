"""Profile of a few steps: an event that reports what most of their time goes into, and a trace for details."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import DeviceType

from springtide.checkpoint.restore import Restored
from springtide.config.steps import StepsDone, one_more
from springtide.distributed import World
from springtide.events import Profiled, Warned
from springtide.storage import Folder
from springtide.training.part import DoneStep, Part, Work

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
"""Longest wait of an ending group for a trace that is being written [s]. It is short because the node may be about to leave."""
_WARM_UP_STEPS = 3
_TOP = 5
_ARITHMETIC = ("mm", "attention", "conv", "einsum", "gemm", "flash", "cutlass")
_COMMUNICATION = ("c10d", "gloo", "nccl", "all_gather", "reduce_scatter", "all_reduce", "allreduce", "fsdp::")
_ARITHMETIC_KERNELS = (
    *("gemm", "gemv", "nvjet", "xmma", "wgmma", "cutlass", "cublas", "cijk_", "triton_tem"),
    *("flash", "fmha", "sdpa", "attention", "fprop", "dgrad", "wgrad", "convolve"),
)
"""Substrings of the names of kernels for matrix products and attention: cuBLAS (nvjet on Hopper and later), CUTLASS, cuDNN,
ROCm, and matrix products by Inductor."""
_COMMUNICATION_KERNELS = ("nccl", "rccl", "nvshmem", "multimem")
_FUSED = "triton_"
"""Prefix of the names of Inductor's fused kernels. The rest of such a name may mention a matrix product that the kernel does
not compute."""
_TRY = {
    "arithmetic": "lower precision (parallel.precision), parallel.compile, faster devices",
    "memory": "parallel.compile, which fuses kernels that read and write the same data; larger train.micro_batch",
    "communication": "larger train.micro_batch, parallel.strategy = zero2 or parallel.shard_workers, a faster network",
    "input": "feed.reads_in_flight, feed.read_bytes, feed.cache, a nearer store",
    "waiting": "equally fast peers (springtide report names stragglers), larger train.micro_batch, parallel.compile",
}
"""Kind of work that takes most of the time -> advice what to try."""


class Profile(Part):
    """Profiler of one worker group. Rank 0 profiles ``steps`` steps after ``_WARM_UP_STEPS`` steps."""

    def __init__(self, steps: int, world: World, folder: Folder, tools: Tools | None = None) -> None:
        """``steps``: number of steps to profile; 0 profiles none. ``folder``: the run's folder, for the trace. ``tools``:
        starts and stops the device's own profiler and marks ranges in its trace (``tools_of``); None without such a
        profiler."""
        self._steps, self._device, self._folder = steps if world.is_first else 0, world.device, folder
        self._ranges = StepRanges(tools)
        self._done, self._began, self._input_s = 0, 0.0, 0.0
        self._profile: Any = None
        self._thread, self._problem = threading.Thread(), ""

    def begin(self, found: Restored | None) -> None:
        self._done, self._input_s = 0, 0.0

    def before_step(self, work: Work) -> None:
        """Open the profiler range (a named span in the trace) of the step."""
        self._ranges.before_step(one_more(work.step))

    def before_update(self) -> None:
        """Open the profiler range (a named span in the trace) of the update."""
        self._ranges.before_update()

    def after_step(self, done: DoneStep) -> Iterator[Profiled | Warned]:
        """Start, continue or end the profile. At its end, yield its summary and write the trace in a thread, so that no step
        waits for the store. After a later step, warn if the trace could not be written."""
        if self._problem:
            reason, self._problem = self._problem, ""
            yield Warned(step=done.step, reason=reason)
        if not self._steps:
            return
        self._done += 1
        self._ranges.after_step()
        if self._done > _WARM_UP_STEPS:
            self._input_s += done.data_wait_s
        if self._done == _WARM_UP_STEPS:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
            self._ranges.begin()
            self._began = time.perf_counter()
        elif self._done == _WARM_UP_STEPS + self._steps:
            wall_s = time.perf_counter() - self._began
            self._ranges.end()
            self._profile.stop()
            yield self._summary(done.step, wall_s)
            self._profile, self._steps = None, 0

    def close(self) -> None:
        """Stop the profilers if training ends before the profile does, and wait up to ``_CLOSE_S`` for the trace."""
        self._ranges.end()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        self.wait(_CLOSE_S)
        if self._problem:  # log the problem, because no step follows that could yield it as a warning
            _log.warning("%s", self._problem)
            self._problem = ""

    def wait(self, limit_s: float) -> None:
        """Wait until no trace is being written, but at most ``limit_s`` seconds."""
        if self._thread.ident is not None:
            self._thread.join(limit_s)

    def _summary(self, step: StepsDone, wall_s: float) -> Profiled | Warned:
        if self._device.type == "cuda":
            kernels = kernels_of(self._profile.events())
            if not kernels:
                seen = "torch's profiler saw nothing of the GPU, as when nsys or ncu has it; their trace has the ranges"
                return Warned(step=step, reason=f"{seen} of the {self._steps} profiled steps")
            found, times = kernel_shares(kernels, wall_s, self._input_s), times_by_name(kernels)
        else:
            times = {one.key: one.self_cpu_time_total / 1e6 for one in self._profile.key_averages()}
            found = shares(times, wall_s, self._input_s)
        name = f"profile/step-{step:010d}.json"
        given = self._profile, name
        self._thread = threading.Thread(target=self._write, args=given, name="springtide-profile", daemon=True)
        self._thread.start()
        bound = max(found, key=lambda kind: found[kind])
        top = dict(sorted(times.items(), key=lambda item: -item[1])[:_TOP])
        return Profiled(
            step=step,
            bound_by=bound,
            shares={kind: round(share, 4) for kind, share in found.items()},
            top={name: round(seconds / wall_s, 4) for name, seconds in top.items()},
            advice=_TRY[bound],
            trace=self._folder.where(name),
        )

    def _write(self, profile: Any, name: str) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profile.export_chrome_trace(str(path))
                self._folder.write(name, path.read_bytes())
        except Exception as error:  # training goes on without the trace
            self._problem = f"the trace could not be written: {error}"


def shares(times_s: Mapping[str, float], wall_s: float, input_s: float) -> dict[str, float]:
    """Return the share of each kind of work in the time ``wall_s``, for operations that run one at a time. Shares add up to
    one.

    ``times_s``: operation -> its seconds. The operation's name decides whether they count as communication, arithmetic or
    memory. ``input_s``: wait for batches. The rest of the time, in which the device had nothing to do, is ``waiting``."""
    found = dict.fromkeys(_TRY, 0.0)
    found["input"] = input_s
    for name, seconds in times_s.items():
        plain = name.lower()
        kind = "memory"
        if any(part in plain for part in _COMMUNICATION):
            kind = "communication"
        elif any(part in plain for part in _ARITHMETIC):
            kind = "arithmetic"
        found[kind] += seconds
    whole = max(wall_s, sum(found.values()))
    found["waiting"] = whole - sum(found.values())
    return {kind: seconds / whole for kind, seconds in found.items()}


class Kernel(NamedTuple):
    """A kernel or copy that ran on a device from ``begin_s`` to ``end_s``, in seconds of the profiler's clock."""

    name: str
    begin_s: float
    end_s: float


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """Return the kernels and copies in a profiler's ``events``. Other events are left out, because they would count the same
    time twice: host operators include the time of their kernels, and annotations include the time of everything within them."""
    return [
        Kernel(one.name, one.time_range.start / 1e6, one.time_range.end / 1e6)
        for one in events
        if one.device_type == DeviceType.CUDA and not getattr(one, "is_user_annotation", False)
    ]


def times_by_name(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the total seconds of the kernels of each name."""
    found: dict[str, float] = defaultdict(float)
    for name, begin_s, end_s in kernels:
        found[name] += end_s - begin_s
    return dict(found)


def kernel_shares(kernels: Sequence[Kernel], wall_s: float, input_s: float) -> dict[str, float]:
    """Return the shares of each kind of work, as ``shares`` does, for a device that runs several kernels at once.

    A moment counts as arithmetic if an arithmetic kernel runs, else as memory if a memory kernel runs, else as communication.
    The rest is idle time: ``input`` is the part of it in which the loop waited for batches, ``waiting`` the remainder."""
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append(kernel)
    found = dict.fromkeys(_TRY, 0.0)
    seen: list[Kernel] = []
    for kind in ("arithmetic", "memory", "communication"):
        before_s = _covered_s(seen)
        seen += by_kind[kind]
        found[kind] = _covered_s(seen) - before_s
    whole_s = max(wall_s, _covered_s(seen))
    idle_s = whole_s - _covered_s(seen)
    found["input"] = min(input_s, idle_s)
    found["waiting"] = idle_s - found["input"]
    return {kind: seconds / whole_s for kind, seconds in found.items()}


def kind_of(kernel: str) -> str:
    """Classify a device kernel by its name. Returns ``arithmetic``, ``memory`` or ``communication``."""
    plain = kernel.lower()
    if any(part in plain for part in _COMMUNICATION_KERNELS):
        return "communication"
    is_fused = plain.startswith(_FUSED) and not plain.startswith("triton_tem")
    return "arithmetic" if not is_fused and any(part in plain for part in _ARITHMETIC_KERNELS) else "memory"


def _covered_s(kernels: Iterable[Kernel]) -> float:
    """Return the seconds in which at least one of the kernels runs."""
    total_s, until_s = 0.0, float("-inf")
    for _, begin_s, end_s in sorted(kernels, key=lambda kernel: kernel.begin_s):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


# Marks of the profiled steps for NVIDIA's profilers: start and stop of the capture, and named ranges.
#
# ``nsys profile --capture-range=cudaProfilerApi`` records from ``start`` to ``stop``. It shows these ranges (NVTX):
#
# step 5               one range for each profiled step, here the run's fifth step
# compute          forward, backward, and the step's all-reduce
# update           clipping and the optimizer
# between steps        events, saves, snapshots, and the wait for the next batch


class Tools(Protocol):
    """Interface to a device's own profiler: capture, and ranges (named spans in its trace)."""

    def start(self) -> None:
        """Start the profiler's capture."""

    def stop(self) -> None:
        """Stop the profiler's capture."""

    def push(self, name: str) -> None:
        """Open a range, a named span of the profiler's trace, inside the ranges that are open."""

    def pop(self) -> None:
        """Close the innermost open range, a named span of the profiler's trace."""


class NvidiaTools:
    """Capture by the CUDA profiler API, and named ranges by NVTX. Without a profiler attached, both cost next to nothing."""

    def start(self) -> None:
        torch.cuda.profiler.start()

    def stop(self) -> None:
        torch.cuda.profiler.stop()

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


def tools_of(device: torch.device) -> Tools | None:
    """Return the profiler tools of a device; None on CPUs and on GPUs that are not NVIDIA's."""
    return NvidiaTools() if device.type == "cuda" and torch.version.hip is None else None


class StepRanges:
    """Marks the profiled steps for a device's own profiler: capture, and named ranges. Without ``tools``, all methods do
    nothing."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools, self._open, self._captures = tools, 0, False

    def begin(self) -> None:
        """Start the profiler's capture. Call it between two steps."""
        if self._tools is not None:
            self._captures = True
            self._tools.start()
            self._enter("between steps")

    def before_step(self, step: int) -> None:
        """Open the profiler ranges of a step. ``step``: steps done after this step."""
        self._leave()
        self._enter(f"step {step}", "compute")

    def before_update(self) -> None:
        """Close the profiler range ``compute`` and open ``update``, inside the range of the step."""
        self._leave(to=1)
        self._enter("update")

    def after_step(self) -> None:
        """Close the profiler ranges of the step and open the range ``between steps``."""
        self._leave()
        self._enter("between steps")

    def end(self) -> None:
        """Close all open profiler ranges, and stop the capture if it runs."""
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
