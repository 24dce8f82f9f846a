"""Which device a rank uses, with as many devices as a test says there are."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch

from springtide.config import Config
from springtide.distributed import device_index, gpu_environment
from springtide.errors import ConfigError


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"), [(1, 0, 0), (1, 3, 0), (1, 7, 0), (8, 0, 0), (8, 3, 3), (8, 7, 7)]
)
def test_a_rank_uses_its_only_device_or_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, expected: int
) -> None:
    """A rank that sees one device uses it and else that of its local rank."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert device_index(local_rank) == expected


@pytest.mark.parametrize(
    ("built", "error", "why"),
    [
        (None, None, "is built without CUDA"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nUpdate it"),
            "too old",
        ),
        ("13.0", None, "CUDA_VISIBLE_DEVICES hides them"),
    ],
)
def test_a_rank_that_sees_no_device_says_why(
    monkeypatch: pytest.MonkeyPatch, built: str | None, error: Exception | None, why: str
) -> None:
    def init() -> None:
        if error:
            raise error

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"no GPU.*{why}") as told:
        device_index(3)
    assert "Update it" not in str(told.value)


@pytest.mark.parametrize(("visible", "local_rank"), [(4, 4)])
def test_a_rank_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(ConfigError, match=f"rank {local_rank} .* {visible}"):
        device_index(local_rank)


def test_torchruns_watchdog_is_off_when_the_group_is_made(monkeypatch: pytest.MonkeyPatch, tiny: Config) -> None:
    """torchrun sets 1 for every process that it starts."""
    entry = importlib.import_module("springtide.training.__main__")
    expected = gpu_environment({"NCCL_IB_HCA": "mlx5"}, deterministic=False)
    for name in expected:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def process_group(device: str) -> None:
        assert {name: os.environ[name] for name in expected} == expected
        raise InterruptedError(device)

    monkeypatch.setattr(entry, "process_group", process_group)
    config = tiny.override(
        {"run.id": "torchrun", "elastic.gpus_per_worker": 1.0, "elastic.env": {"NCCL_IB_HCA": "mlx5"}}
    )
    monkeypatch.setattr(sys, "argv", ["train", "--config", "none"])
    monkeypatch.setattr(entry.configs, "load_config", lambda path, trust_code: config)
    with pytest.raises(InterruptedError, match="cuda"):
        entry.main()
    assert expected["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert float(expected["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > float(config.elastic.hang)
