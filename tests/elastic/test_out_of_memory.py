"""Where memory ends, a run goes on with smaller micro-batches of the same global batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.train import FailureConfig, WorkerGroupError
from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision

from springtide.config import Config
from springtide.elastic.group_sizes import MemoryLimits
from springtide.ray.train.failure_policy import SpringtideFailurePolicy, is_out_of_memory
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import open_mailbox
from springtide.ray.train.process_pool import WorkerProcessPool

pytestmark = pytest.mark.cluster


def torchs() -> None:
    torch.empty(2**50)


def numpys() -> None:
    np.ones(2**50)


def nobodys() -> None:
    raise ValueError("memory of a better time")


def raised(function: object) -> Exception:
    assert callable(function)
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as found:
        function()
    return found.value


@pytest.mark.parametrize(("function", "expected"), [(torchs, True), (numpys, True), (nobodys, False)])
def test_what_they_say_where_memory_ends_is_known(function: object, expected: bool) -> None:
    assert is_out_of_memory(raised(function)) is expected


@pytest.mark.parametrize(("reduction", "limits"), [("fp32", [8, 4, 2, 1]), ("fp64", [2, 1])])
def test_micro_batches_are_halved_from_what_a_worker_had_until_they_are_of_one_row(
    tiny: Config, ray_cluster: str, reduction: str, limits: list[int]
) -> None:
    """Three workers share twelve lanes of four rows: 16 rows each, or lanes of 4, whatever train.micro_batch says."""
    import ray

    changes = {"stream.global_batch": 48, "stream.lanes": 12, "train.micro_batch": 100, "parallel.reduction": reduction}
    config = tiny.override({**changes, "train.total": 48 * 64 * 10, "optim.warmup": 0})
    mailbox = open_mailbox(f"memory-{reduction}")
    processes, job = WorkerProcessPool(), TrainJob(config, mailbox)
    processes.prepare((ray.get_runtime_context().get_node_id(),) * 3, job)
    policy = SpringtideFailurePolicy(
        FailureConfig(max_failures=3), job, processes, MemoryLimits(config.train.rows_at_once)
    )
    error = WorkerGroupError("", {1: raised(torchs), 0: RuntimeError("Connection closed by peer")})
    assert mailbox.largest_micro_batch().get() is None
    for limit in limits:
        assert policy.make_decision(error) is FailureDecision.RETRY
        assert mailbox.largest_micro_batch().get() == limit
    assert policy.make_decision(error) is FailureDecision.RAISE
    failures = mailbox.take(1.0).get()
    while more := mailbox.take(0.5).get():
        failures += more
    assert [failed.cause for failed in failures] == ["out of memory"] * len(failures)
    assert f"micro-batches have {limits[0]} rows instead of {2 * limits[0]} from now on" in failures[0].reason
    assert failures[-1].reason.endswith("a micro-batch has only one row already")
    ray.kill(mailbox.actor)
