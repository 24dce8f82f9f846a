"""What is known against a GPU before it trains, and what its host lacks. NVML, torch's devices and the kernel are faked."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import done_step

from springtide.errors import ConfigError
from springtide.storage import host_limits
from springtide.training import preflight
from springtide.training.energy import Counter, EnergyMeter
from springtide.training.nvml import Gpu

GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    """As pynvml's."""


class Card:
    """A card, and what NVML tells of it."""

    def __init__(self, rows: tuple[int, ...] = (0, 0, 0, 0), action: int = 0, reasons: int = 0) -> None:
        self.rows, self.action, self.reasons, self.xids = rows, action, reasons, list[int]()

    @property
    def gpu(self) -> Gpu:
        """The card, of a module ``pynvml``."""
        module = SimpleNamespace(
            NVMLError=NVMLError,
            NVML_TEMPERATURE_GPU=0,
            NVML_CLOCK_SM=1,
            NVML_FI_DEV_GET_GPU_RECOVERY_ACTION=230,
            nvmlEventTypeXidCriticalError=8,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetRemappedRows=lambda handle: self.known(self.rows),
            nvmlDeviceGetCurrentClocksEventReasons=lambda handle: self.reasons,
            nvmlDeviceGetFieldValues=self.fields,
            nvmlEventSetCreate=lambda: "events",
            nvmlDeviceRegisterEvents=self.register,
            nvmlEventSetWait=lambda events, timeout_ms: SimpleNamespace(eventData=self.known(self.xids).pop(0)),
        )
        return Gpu(module, "GPU-1")

    def known(self, value: Any) -> Any:
        if not value:
            raise NVMLError("Not Supported, or Timeout")
        return value

    def fields(self, handle: str, fields: list[int]) -> list[Any]:
        assert fields == [230]
        return [SimpleNamespace(nvmlReturn=0 if self.action >= 0 else 3, value=SimpleNamespace(uiVal=self.action))]

    def register(self, handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("GPU-1", 8, "events")


@pytest.mark.parametrize(
    ("card", "fault", "remarks"),
    [
        (Card(), "", []),
        (Card(rows=(), action=-1), "", []),  # a card that knows neither
        (Card(rows=(3, 2, 0, 0)), "", []),  # remapped: as good as before
        (Card(rows=(0, 1, 1, 0)), "", ["wait to be remapped"]),
        (Card(rows=(0, 9, 0, 1)), "could not be remapped: replace it", []),
        (Card(action=1), "needs a reset, its driver says", []),
        (Card(action=2), "needs a reboot of its host, its driver says", []),
        (Card(reasons=0x4), "", []),  # a power cap is usual
        (Card(reasons=0x48), "", ["lowered by hardware slowdown, heat (hardware)"]),
    ],
)
def test_a_gpu_is_judged_by_rows_recovery_and_clocks(card: Card, fault: str, remarks: list[str]) -> None:
    """A GPU is judged by its rows its recovery and its clocks."""
    gpu = card.gpu
    assert gpu.fault().endswith(fault) if fault else gpu.fault() == ""
    found = gpu.remarks()
    assert len(found) == len(remarks)
    assert all(part in text for part, text in zip(remarks, found, strict=True))


@pytest.mark.parametrize("tells", [True, False])
def test_critical_errors_of_all_ranks_are_reported_by_the_first(tells: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Critical errors are noted on every rank and told by the first."""
    card, now = Card(), [0.0]
    meter = EnergyMeter(Counter("nvml", lambda: 0.0), gpu=card.gpu, clock=lambda: now[0], tells=tells)
    card.xids += [94, 79]
    now[0] = 31.0
    done = done_step()
    found = list(meter.after_step(done))
    assert "XID 94, 79" in caplog.text
    assert [event.describe() for event in found] == ["step 3: GPU of rank 0: XID 94 and 79"] * tells
    now[0] = 62.0
    assert [event.describe() for event in meter.after_step(done)] == ["step 3: GPU of rank 0: "] * tells


class Device:
    """One device as torch sees it, of which others hold ``used`` bytes at the first looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: list[int], total: int = 80 * 10**9, name: str = "H100"):
        self.slept = 0
        monkeypatch.setattr(preflight, "gpu_of", lambda device: None)
        monkeypatch.setattr(preflight.time, "sleep", lambda seconds: used.pop(0))
        for function, value in {
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (total - used[0], total),
            "memory_reserved": lambda device: 0,
            "get_device_name": lambda device: name,
        }.items():
            monkeypatch.setattr(torch.cuda, function, value)


@pytest.mark.parametrize(
    ("used", "share", "fault"),
    [
        ([10**9], 1.0, ""),
        ([40 * 10**9, 40 * 10**9, 10**9], 1.0, ""),  # of a process that was just ended
        ([40 * 10**9] * 11, 1.0, "has 40 of 80 GB in use by others: end them (nvidia-smi shows who)"),
        ([40 * 10**9], 0.5, ""),  # shared on purpose
    ],
)
def test_a_busy_gpu_is_told_with_who_to_ask(
    monkeypatch: pytest.MonkeyPatch, used: list[int], share: float, fault: str
) -> None:
    Device(monkeypatch, used)
    assert preflight.device_fault(GPU, share) == fault


def test_without_ray_a_gpu_that_must_not_train_ends_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, [40 * 10**9] * 11)
    with pytest.raises(ConfigError, match=r"device = 'cuda:0': .*40 of 80 GB.*CUDA_VISIBLE_DEVICES"):
        preflight.check_gpu(GPU)
    monkeypatch.setattr(preflight, "device_fault", lambda device: "")
    monkeypatch.setattr(preflight, "host_remarks", lambda device: ["a slice"])
    assert preflight.check_gpu(GPU) == ["a slice"]
    assert preflight.check_gpu(torch.device("cpu")) == []


def test_a_gpu_slice_and_missing_shared_memory_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slice and a host without shared or locked memory are told."""
    Device(monkeypatch, [0], name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    for device in ("mlx5_0", "mlx5_1"):
        (tmp_path / "class/infiniband" / device).mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    for name in ("lacks_locked_memory", "lacks_shared_memory"):
        function = getattr(host_limits, name)
        monkeypatch.setattr(preflight, name, lambda function=function: function(str(tmp_path)))
    slice_, shared, locked = preflight.host_remarks(GPU)
    assert "MIG 1g.10gb" in slice_
    assert shared.startswith("64 MiB")
    assert "--shm-size=1g" in shared
    assert locked.startswith("8 MiB ")
    assert "--ulimit memlock=-1" in locked
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host_limits.lacks_locked_memory(str(tmp_path)) == ""
    assert host_limits.lacks_locked_memory(str(tmp_path / "none")) == ""


def host(root: Path, nodes: dict[str, str], gpu_node: str) -> str:
    """A host with these memory nodes -> CPUs, and a GPU at 0000:dc:00.0."""
    for node, cpus in nodes.items():
        (root / "devices/system/node" / node).mkdir(parents=True)
        (root / "devices/system/node" / node / "cpulist").write_text(f"{cpus}\n")
    gpu = root / "bus/pci/devices/0000:dc:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{gpu_node}\n")
    return str(root)


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "near"),
    [
        ({"node0": "0-3,8-9", "node1": "4-7,10"}, "1", {4, 5, 6, 7, 10}),
        ({"node0": "0-3", "node1": "4-7"}, "-1", set()),  # a virtual machine that does not tell
        ({"node0": "0-7"}, "0", set()),
        ({"node0": "0-3", "node1": ""}, "1", set()),  # memory without CPUs
        ({}, "0", set()),
    ],
)
def test_the_cpus_near_a_gpu_are_read(nodes: dict[str, str], gpu_node: str, near: set[int], tmp_path: Path) -> None:
    sys = host(tmp_path, nodes, gpu_node)
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    assert preflight.near_cpus(preflight.pci_address(found), sys) == near
    assert preflight.near_cpus(preflight.pci_address(SimpleNamespace()), sys) == set()


def test_all_threads_are_bound_to_what_they_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bound: dict[int, set[int]] = {}

    def bind(thread: int, cpus: set[int]) -> None:
        if thread == 12:
            raise ProcessLookupError
        bound[thread] = cpus

    sys = host(tmp_path / "sys", {"node0": "0-3", "node1": "4-7"}, "1")
    for thread in ("11", "12", "13"):
        (tmp_path / "task" / thread).mkdir(parents=True)
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 4, 5})
    assert preflight.bind_to_gpu(GPU, sys, str(tmp_path / "task")) == {4, 5}
    assert bound == {11: {4, 5}, 13: {4, 5}}
    bound.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1})  # a container with far CPUs only
    assert preflight.bind_to_gpu(GPU, sys, str(tmp_path / "task")) == set()
    assert preflight.bind_to_gpu(torch.device("cpu"), sys) == set()
    assert not bound
