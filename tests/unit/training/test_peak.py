"""Devices by the names that their drivers give them, and what is said of one that is not known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from springtide.training import device as module
from springtide.training.device import data_sheet, peak_flops

NAMES = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H800": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla T4": 65e12,
    "AMD Instinct MI300X": 1307.4e12,
}
UNKNOWN = [
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "Quadro RTX 6000",
    "NVIDIA T400",
    "Tesla P100-PCIE-16GB",
    "NVIDIA H1000",
]


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    peak_flops.cache_clear()
    yield
    peak_flops.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_a_device_has_the_peak_of_its_data_sheet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    flops, source = peak_flops(torch.device("cuda", 0))
    assert flops == NAMES[name]
    assert "data sheet, dense" in source
    assert name in source


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_only_looks_like_a_known_one_is_unknown(name: str) -> None:
    assert data_sheet(name) is None


@pytest.mark.parametrize(("capability", "kind"), [((9, 0), "bf16"), ((7, 0), "fp16")])
def test_an_unknown_gpu_is_measured_in_what_its_tensor_cores_take_and_said_to_be(
    capability: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.dtype, int]] = []

    def measure(device: torch.device, dtype: torch.dtype, size: int) -> float:
        asked.append((dtype, size))
        return 1e15

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Z9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(module, "_measure", measure)
    assert peak_flops(torch.device("cuda", 0)) == (
        1e15,
        f"{kind} matmul of 8192x8192 measured on this unknown NVIDIA Z9 at start, best of 10",
    )
    assert asked == [({"bf16": torch.bfloat16, "fp16": torch.float16}[kind], 8192)]


def test_a_cpu_is_measured_in_fp32() -> None:
    flops, source = peak_flops(torch.device("cpu"))
    assert flops > 1e8
    assert source == "fp32 matmul of 1024x1024 measured on this cpu at start, best of 10"
