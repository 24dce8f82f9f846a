"""Operations by what they are bound by."""

from __future__ import annotations

import pytest

from springtide.train.profile import shares


def test_each_kind_has_its_share_and_they_add_up_to_one() -> None:
    times = {"aten::addmm": 3.0, "aten::mul": 1.0, "c10d::allreduce_": 2.0, "ncclDevKernel_AllGather": 1.0}
    found = shares(times, wall_s=10.0, input_s=1.5)
    assert found == pytest.approx(
        {"arithmetic": 0.3, "memory": 0.1, "communication": 0.3, "input": 0.15, "waiting": 0.15}
    )


def test_what_runs_at_once_is_no_more_than_all() -> None:
    found = shares({"flash_fwd_kernel": 8.0, "nccl": 8.0}, wall_s=10.0, input_s=0.0)
    assert found["arithmetic"] == found["communication"] == 0.5
    assert found["waiting"] == 0.0
