"""A rehearsal is a real step, leaves no process group behind, and finds a device that computes wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from springtide import config as configs
from springtide.training import device_check
from springtide.training.device_check import check_device, is_right, matrices
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_of_the_check_is_exact_however_its_sums_are_cut(dtype: torch.dtype) -> None:
    """cuBLAS may cut a sum into parts and round each of them to bf16."""
    a, b = matrices(256, dtype, torch.device("cpu"))
    assert is_right(a @ b)
    for parts in (2, 4, 16):
        cut = zip(a.chunk(parts, 1), b.chunk(parts, 0), strict=True)
        assert is_right(torch.stack([left @ right for left, right in cut]).sum(0, dtype=dtype))
    product = a @ b
    product[200, 7] += 1
    assert not is_right(product)
    b[37, 11] += 1  # one wrong summand
    assert not is_right(a @ b)
