"""A rehearsal is a real step, leaves no process group behind, and finds a device that computes wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from springtide import config as configs
from springtide.training import device_check
from springtide.training.device_check import check_device
from springtide.training.preflight import preflight


def test_a_process_may_rehearse_before_each_group_it_joins() -> None:
    config = configs.recipes.tiny().override({"parallel.threads": 1, "parallel.reduction": "fp64"})
    for _ in range(2):
        found = preflight(config)
        assert not dist.is_initialized()
        assert found.wrong == ""
        assert found.flops_per_s > 1e8
        assert found.copy_bytes_per_s > 1e7


def test_one_wrong_bit_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = device_check._best_s

    def flipped(device: torch.device, function: object) -> tuple[float, torch.Tensor]:
        seconds, found = timed(device, function)
        if found.dtype == torch.float32:
            found[17, 3] += 1
        return seconds, found

    monkeypatch.setattr(device_check, "_best_s", flipped)
    assert check_device(torch.device("cpu")).wrong == "multiplies wrong"
