"""GPUs that are lost, sliced, busy, unlike each other or without a driver are told, and a torch that was not built for them."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from springtide.api import doctor as checks

pytestmark = pytest.mark.processes

HEALTHY = "NVIDIA H100 80GB HBM3, 580.95.05, 81559, 4, 0, 0x0, Disabled"
FACTS: dict[str, Any] = {"cuda": "13.0", "nccl": "2.28.9", "num_gpus": 8, "capabilities": ["9.0"], "archs": ["sm_90"]}


@pytest.mark.parametrize(
    ("line", "status", "part"),
    [
        ("NVIDIA H100, 570.1, 81559, 4, 0, 0x0000000000000000, Disabled", "ok", "driver 570.1"),
        ("NVIDIA H100, 570.1, 81559, 4, 0, 0x0000000000000004, Disabled", "ok", "4 of 81559 MiB"),  # a power cap
        ("NVIDIA H100, 570.1, 81559, 4, 0, 0x0000000000000040, Disabled", "warn", "thermal (hardware)"),
        ("NVIDIA H100, 570.1, 81559, 40000, 0, 0x0, Disabled", "warn", "40000 of 81559"),
        ("NVIDIA H100, 570.1, 81559, 4, 2, 0x0, Disabled", "fail", "ECC errors 2"),
        ("NVIDIA H100, 570.1, 81559, 4, 0, 0x0, Enabled", "warn", "cut into slices (MIG)"),
        ("NVIDIA RTX, 570.1, 24564, 4, [N/A], [N/A], [N/A]", "ok", "ECC errors [N/A]"),
        ("no devices were found", "fail", "no devices"),
    ],
)
def test_a_gpu_is_judged_by_what_its_driver_says(line: str, status: str, part: str) -> None:
    found = checks.gpu(0, line)
    assert found.status == status
    assert part in found.figure
    assert bool(found.remedy) == (status != "ok")


class Host:
    """A machine with devices on its bus, files of its driver, and an nvidia-smi that says what a test lets it."""

    def __init__(self, root: Path, on_bus: int, files: int = 0, said: str | None = None, status: int = 0) -> None:
        for number in range(on_bus):
            device = root / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
        bridge = root / "sys/bus/pci/devices/0000:ff:00.0"
        bridge.mkdir(parents=True)
        (bridge / "vendor").write_text("0x10de\n")
        (bridge / "class").write_text("0x068000\n")  # an NVSwitch
        (root / "dev").mkdir()
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(files))]:
            (root / "dev" / name).touch()
        (root / "bin").mkdir()
        if said is not None:
            program = root / "bin/nvidia-smi"
            program.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\nexit {status}\n")
            program.chmod(0o755)
        self.path = {"PATH": f"{root / 'bin'}:{os.defpath}"} if said is not None else {"PATH": str(root / "bin")}
        self.folders = {"sys": str(root / "sys"), "dev": str(root / "dev")}

    def checks(self) -> list[checks.Check]:
        """What the doctor finds, without what is well."""
        return [one for one in checks.gpus(self.path, **self.folders) if one.status != "ok"]


def test_a_healthy_host_reports_nothing_to_mend(tmp_path: Path) -> None:
    """A healthy host has nothing to mend and one without GPUs says so."""
    assert Host(tmp_path / "eight", 8, 8, "\n".join([HEALTHY] * 8)).checks() == []
    [one] = checks.gpus({"PATH": ""}, str(tmp_path), str(tmp_path))
    assert (one.status, one.figure.startswith("no NVIDIA driver")) == ("ok", True)


@pytest.mark.parametrize(
    ("on_bus", "files", "said", "status", "figure", "remedy"),
    [
        (2, 0, None, 0, "2 NVIDIA devices on the bus, and no driver here", "install NVIDIA's driver"),
        (1, 1, "Driver/library version mismatch", 18, "status 18: Driver/library version mismatch", "one version"),
        (1, 1, "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.", 15, "status 15", "Xid 79"),
        (2, 2, HEALTHY, 0, "1 of 2 answer: the others fell off the bus", "reboot the host"),
        (8, 1, HEALTHY, 0, "", ""),  # a container that was given one of eight
        (2, 2, f"{HEALTHY}\n{HEALTHY.replace('H100', 'A100')}", 0, "1 x NVIDIA A100 80GB HBM3 and 1 x", "slowest"),
    ],
)
def test_a_missing_driver_or_lost_gpu_is_reported(
    tmp_path: Path, on_bus: int, files: int, said: str | None, status: int, figure: str, remedy: str
) -> None:
    """A host without driver or with a lost or another GPU is told."""
    found = Host(tmp_path, on_bus, files, said, status).checks()
    assert len(found) == bool(figure)
    for one in found:
        assert figure in one.figure
        assert remedy in one.remedy


def test_locked_and_shared_memory_are_checked_where_the_network_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    [locked] = checks.network_of_gpus(str(tmp_path), "none")
    assert (locked.status, locked.figure) == ("ok", "0.0625 MiB (InfiniBand or EFA: none)")
    (tmp_path / "class/infiniband/rdmap79s0").mkdir(parents=True)
    [locked] = checks.network_of_gpus(str(tmp_path), "none")
    assert (locked.status, locked.limit) == ("fail", "without limit")
    assert locked.remedy.startswith("memlock unlimited")
    monkeypatch.setattr(checks, "lacks_shared_memory", lambda path: "64 MiB are free: docker run --shm-size=1g")
    assert checks.network_of_gpus(str(tmp_path), "none")[1].remedy == "docker run --shm-size=1g"


@pytest.mark.parametrize(
    ("facts", "driver", "status", "said"),
    [
        ({}, "580.95.05", "ok", "built CUDA 13.0, NCCL 2.28.9, sees 8 GPUs"),
        ({"cuda": "", "num_gpus": 0}, "", "ok", "built without CUDA"),
        ({"cuda": "", "num_gpus": 0}, "550.54", "fail", "whl/cu126"),
        ({"num_gpus": 0}, "550.54", "fail", "driver 580 or newer for CUDA 13"),
        ({}, "550.54", "ok", "sees 8 GPUs"),  # with NVIDIA's compatibility package
        ({"num_gpus": 0}, "580.95.05", "fail", "CUDA_VISIBLE_DEVICES"),
        ({"capabilities": ["7.0"], "archs": ["sm_75", "sm_90"]}, "580.95.05", "fail", "code for sm_70"),
    ],
)
def test_a_torch_built_for_another_driver_or_gpu_is_reported(
    facts: dict[str, Any], driver: str, status: str, said: str
) -> None:
    """A torch that was not built for this driver or GPU is told."""
    found = checks.torch_check({**FACTS, **facts}, driver)
    assert found.status == status
    assert said in found.describe()
    assert bool(found.remedy) == (status != "ok")


def test_the_drivers_version_is_asked_for(tmp_path: Path) -> None:
    assert checks.driver_of(Host(tmp_path / "one", 1, 1, "580.95.05").path) == "580.95.05"
    assert checks.driver_of(Host(tmp_path / "broken", 1, 1, "no driver", 9).path) == ""
    assert checks.driver_of({"PATH": ""}) == ""
