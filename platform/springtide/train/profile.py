"""A look into a few steps: where their time goes, in plain words, beside the trace for whoever wants to see for himself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from springtide.parallel import World
from springtide.store import Folder
from springtide.track.events import Profiled

_WARM_UP_STEPS = 3
_TOP = 5
_ARITHMETIC = ("mm", "attention", "conv", "einsum", "gemm", "flash", "cutlass")
_COMMUNICATION = ("c10d", "gloo", "nccl", "all_gather", "reduce_scatter", "all_reduce", "allreduce", "fsdp::")
_TRY = {
    "arithmetic": "lower precision (parallel.precision), parallel.compile, faster devices",
    "memory": "parallel.compile, which joins what reads and writes the same; larger train.micro_batch",
    "communication": "larger train.micro_batch, parallel.strategy = zero2 or parallel.shard_workers, a faster network",
    "input": "feed.reads_in_flight, feed.read_bytes, feed.cache, a nearer store",
    "waiting": "peers that are as fast (springtide report names stragglers), larger train.micro_batch, parallel.compile",
}
"""Of what most time goes into -> what to try."""


class Profile:
    """Of one group of workers; rank 0 looks at so many steps after its first few."""

    def __init__(self, steps: int, world: World, folder: Folder) -> None:
        """``steps`` 0 looks at none; ``folder`` is the run's."""
        self._steps, self._device, self._folder = steps if world.is_first else 0, world.device, folder
        self._done, self._began, self._input_s = 0, 0.0, 0.0
        self._profile: Any = None

    def after(self, step: int, data_wait_s: float) -> Iterator[Profiled]:
        """Begin, go on or end, after ``step``, whose batch was waited for so long. At the end the trace is written, and told
        what it says."""
        if not self._steps:
            return
        self._done += 1
        if self._done > _WARM_UP_STEPS:
            self._input_s += data_wait_s
        if self._done == _WARM_UP_STEPS:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
            self._began = time.perf_counter()
        elif self._done == _WARM_UP_STEPS + self._steps:
            wall_s = time.perf_counter() - self._began
            self._profile.stop()
            yield self._tell(step, wall_s)
            self._profile, self._steps = None, 0

    def close(self) -> None:
        """Training ends before the steps do."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _tell(self, step: int, wall_s: float) -> Profiled:
        on_gpu = self._device.type == "cuda"
        times = {
            one.key: (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e6
            for one in self._profile.key_averages()
        }
        name = f"profile/step-{step:010d}.json"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._folder.write(name, path.read_bytes())
        found = shares(times, wall_s, self._input_s)
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


def shares(times_s: Mapping[str, float], wall_s: float, input_s: float) -> dict[str, float]:
    """Of ``wall_s``, what each kind of work took: the times of operations by name, what was waited for batches, and the rest,
    ``waiting``, in which the device had nothing to do. They add up to one."""
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
