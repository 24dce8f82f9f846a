"""Joules of one rank: counters that wrap, are set back, cannot be read; what a step's message gets of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import contributed, done_step, work_of

from springtide.config.steps import StepsDone
from springtide.events import Monitored
from springtide.training.energy import Counter, EnergyMeter, Rapl, counter_of, shared
from springtide.training.nvml import Gpu, gpu_of

DONE = done_step()


class Machine:
    """A clock and a counter that a test moves."""

    def __init__(self) -> None:
        self.now_s, self.joules, self.reads, self.broken = 0.0, 1000.0, 0, False

    def clock(self) -> float:
        return self.now_s

    def read(self) -> float:
        self.reads += 1
        if self.broken:
            raise OSError("no such device")
        return self.joules

    def run(self, seconds: float, watts: float) -> None:
        self.now_s += seconds
        self.joules += seconds * watts

    def meter(self, every_s: float = 0.0, **options: Any) -> EnergyMeter:
        return EnergyMeter(Counter("nvml", self.read, every_s), clock=self.clock, **options)


def one_step(machine: Machine, meter: EnergyMeter, before: tuple[float, float], compute: tuple[float, float]) -> Any:
    """Let some time pass before a step and in it, (seconds, watts) each; returns what its message gets."""
    machine.run(*before)
    meter.before_step(work_of())
    machine.run(*compute)
    found = contributed(meter)
    return found["energy_j"], found["energy_between_j"]


def test_a_message_gets_the_energy_since_the_last_one() -> None:
    """A message gets what was used since the last one and how much of it between steps."""
    machine = Machine()
    meter = machine.meter()
    assert one_step(machine, meter, (2.0, 10.0), (1.0, 300.0)) == (320.0, 20.0)
    machine.run(0.5, 300.0)  # what the device does after the message has left
    assert list(meter.after_step(DONE)) == []
    assert one_step(machine, meter, (4.0, 50.0), (1.0, 300.0)) == (650.0, 200.0)


def test_a_rank_counts_its_share_of_what_its_host_uses() -> None:
    machine = Machine()
    counter = Counter("rapl", machine.read, 0.0, "host a")
    share, source = shared(counter, [("rapl", "host a"), ("rapl", "host b"), ("rapl", "host a")])
    assert (share, source) == (0.5, "rapl")
    meter = EnergyMeter(counter, share, source, clock=machine.clock)
    assert one_step(machine, meter, (1.0, 0.0), (1.0, 100.0)) == (50.0, 0.0)
    nvml = Counter("nvml", machine.read)
    assert shared(nvml, [("nvml", ""), ("nvml", "")]) == (1.0, "nvml")
    assert shared(nvml, [("nvml", ""), ("rapl", "host a")]) == (1.0, "mixed: nvml; rapl")


def test_a_counter_is_read_once_a_second() -> None:
    """A counter is read once a second and the total is what it counted."""
    machine = Machine()
    meter = machine.meter(every_s=1.0)
    told = 0.0
    for _ in range(100):  # 20 s, and three looks a step
        told += one_step(machine, meter, (0.05, 100.0), (0.15, 300.0))[0]
        list(meter.after_step(DONE))
    assert 18 <= machine.reads <= 21
    told += one_step(machine, meter, (1.0, 300.0), (1.0, 300.0))[0]
    assert told == pytest.approx(machine.joules - 1000.0, rel=1e-9)


def test_a_falling_power_never_counts_below_0() -> None:
    """A falling power is made up for and never counts below 0."""
    machine = Machine()
    meter = machine.meter(every_s=1.0)
    found = [one_step(machine, meter, (0.0, 0.0), (0.5, watts))[0] for watts in [400.0] * 5 + [0.0] * 9 + [200.0] * 9]
    machine.run(1.0, 0.0)
    found.append(meter.take()[0])
    assert min(found) >= 0.0
    assert sum(found) == pytest.approx(machine.joules - 1000.0)


@pytest.mark.parametrize("jump", [-1000.0, 1e9])
def test_a_jump_of_a_counter_is_skipped_and_said_once(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    meter = machine.meter()
    for _ in range(2):
        machine.joules += jump
        assert one_step(machine, meter, (0.0, 0.0), (1.0, 0.0)) == (0.0, 0.0)
        assert one_step(machine, meter, (0.0, 0.0), (1.0, 200.0)) == (200.0, 0.0)
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "(nvml)" in caplog.text


def test_a_counter_that_cannot_be_read_for_a_while_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    meter = machine.meter()
    machine.broken = True
    assert one_step(machine, meter, (0.0, 0.0), (1.0, 100.0)) == (0.0, 0.0)
    assert "no such device" in caplog.text
    machine.broken = False
    assert one_step(machine, meter, (100.0, 500.0), (1.0, 100.0)) == (50_200.0, 50_100.0)  # it has counted meanwhile
    assert len(caplog.records) == 1


def zone(powercap: Path, name: str, label: str, microjoules: int, most: int = 1000_000_000) -> Callable[[int], None]:
    folder = powercap / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")

    def write(value: int) -> None:
        (folder / "energy_uj").write_text(f"{value}\n")

    write(microjoules)
    return write


def test_rapl_counts_packages_and_memory_and_wraps(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 5_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    zone(tmp_path, "intel-rapl:1", "psys", 7_000_000)
    rapl = Rapl(tmp_path)
    assert rapl.joules() == 0.0
    first(2_000_000)
    memory(500_000)
    assert rapl.joules() == pytest.approx(1.0 + 2.0 + 0.5)
    assert rapl.joules() == pytest.approx(3.5)


def test_the_first_counter_that_can_be_read_is_taken(tmp_path: Path) -> None:
    assert counter_of(None, powercap=tmp_path).name == "estimate: 3.5 W x CPU time"
    assert counter_of(None, "cuda", tmp_path).name == "estimate: 3.5 W x CPU time, without the GPU"
    write = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    found = counter_of(None, powercap=tmp_path)
    assert (found.name, found.host) == ("rapl", Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    write(3_000_001)
    assert found.joules() == pytest.approx(3.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("nonsense")
    assert counter_of(None, powercap=tmp_path).name.startswith("estimate")
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:0" / "energy_uj").symlink_to(tmp_path)  # as unreadable as a file of root's, to root too
    assert counter_of(None, powercap=tmp_path).name.startswith("estimate")


def test_the_estimate_grows_with_the_cpu_time_of_this_process(tmp_path: Path) -> None:
    meter = EnergyMeter(counter_of(None, powercap=tmp_path))
    before_s = time.process_time()
    while time.process_time() - before_s < 0.05:
        pass
    used_s = time.process_time() - before_s
    assert 0.05 * 3.5 <= meter.take()[0] <= (used_s + 1.0) * 3.5


class NVMLError(Exception):
    """As pynvml's."""


class NotSupported(NVMLError):
    """As pynvml's NVMLError_NotSupported."""


def nvml(**told: Any) -> SimpleNamespace:
    """NVML's module with functions that return ``told``; the others are not supported."""

    def function(name: str) -> Callable[..., Any]:
        def answer(*_: Any) -> Any:
            if name not in told:
                raise NotSupported("Not Supported")
            return told[name]

        return answer

    names = ("TotalEnergyConsumption", "UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature", "ClockInfo")
    functions = {f"nvmlDeviceGet{name}": function(name) for name in names}
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        **functions,
    )


def test_nvml_counts_millijoules_and_a_card_without_a_counter_is_estimated(tmp_path: Path) -> None:
    counts = Gpu(nvml(TotalEnergyConsumption=12_500), "GPU-1")
    assert counts.joules() == 12.5
    assert counter_of(counts, "cuda", tmp_path).name == "nvml"
    slice_of = Gpu(nvml(), "GPU-1")
    with pytest.raises(OSError, match="NVML: DeviceGetTotalEnergyConsumption"):
        slice_of.joules()
    assert counter_of(slice_of, "cuda", tmp_path).name == "estimate: 3.5 W x CPU time, without the GPU"


def test_rank_0_reads_its_gpu_every_half_minute() -> None:
    """Rank 0 looks at its GPU every half minute and tells what it knows."""
    machine = Machine()
    some = nvml(
        UtilizationRates=SimpleNamespace(gpu=93, memory=40),
        MemoryInfo=SimpleNamespace(used=2**30),
        PowerUsage=512_000,
        Temperature=61,
    )
    meter = machine.meter(gpu=Gpu(some, "GPU-1"))
    seen = []
    for _ in range(70):
        machine.run(1.0, 500.0)
        seen += list(meter.after_step(DONE))
    [one, two] = seen
    assert isinstance(one, Monitored)
    assert (one.utilisation, one.memory_used_bytes, one.power_w, one.temperature_c) == (0.93, 2**30, 512.0, 61)
    assert one.clock_mhz is None
    assert one.describe() == "step 3: GPU of rank 0: busy 93%, memory 1.0 GiB, power 512 W, temperature 61 degrees"
    assert two.step == 3


def test_a_real_gpu_counts_joules() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("pynvml")
    gpu = gpu_of(torch.device("cuda", 0))
    if gpu is None:
        pytest.skip("needs a GPU that NVML knows, and no slice of one")
    figures = gpu.figures(StepsDone(1))
    assert figures.memory_used_bytes
    assert figures.temperature_c
    counter = counter_of(gpu, "cuda")
    if counter.name != "nvml":
        pytest.skip("needs a GPU that counts its energy")
    meter = EnergyMeter(counter)
    a = torch.ones(4096, 4096, device="cuda")
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < 2.0:
        (a @ a).sum().item()
    assert 10.0 < meter.take()[0] < 2 * 2.0 * 2000.0


def test_without_a_gpu_nvml_is_not_asked() -> None:
    assert gpu_of(torch.device("cpu")) is None
