"""Benchmarks on Ray still run; the others are in tests/benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from quick import claims, traces

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def on_the_cluster(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks for a cluster finds the one of the tests; those that take nodes away start their own."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


@pytest.mark.usefixtures("on_the_cluster")
def test_what_a_step_and_what_preparing_costs_is_measured() -> None:
    assert claims("step_overhead").keys() == {"step_overhead", "step_overhead_torchrun"}
    found = claims("prepare")
    assert found.keys() >= {"prepare_vs_tokenizer", "prepare_on_ray_vs_tokenizer"}
    assert ("prepare_vs_datatrove" in found) != ("left out" in found["prepare_vs_tokenizer"]["detail"])


def test_a_node_is_lost_and_a_step_is_measured_without_all_that() -> None:
    assert claims("recovery").keys() >= {"steady_state_cost", "kill_steps_lost"}


def test_a_kill_is_noticed_while_the_report_is_written() -> None:
    assert claims("kill_gap").keys() == {"kill_noticed_s", "kill_noticed_later_s"}


def test_the_start_of_a_run_is_timed() -> None:
    assert claims("startup").keys() == {"startup_vs_floor", "end_s"}


def test_what_nodes_fetch_is_counted_and_a_drained_node_reads_elsewhere() -> None:
    assert claims("node_reads").keys() == {"row_groups_fetched", "row_groups_vs_spread"}


def test_a_race_of_sweeps_has_its_end() -> None:
    assert claims("sweep", "--only", "race").keys() == {"worker_seconds_vs_fixed_asha", "trial_start_vs_bare_tune"}


def test_a_record_is_replayed_to_a_sweep(tmp_path: Path) -> None:
    assert claims("sweep", "--only", "trace", "--traces", str(traces(tmp_path))).keys() == {"preempted_work_lost"}


def test_a_record_is_drilled_and_simulated(tmp_path: Path) -> None:
    assert claims("drilled", "--traces", str(traces(tmp_path))).keys() == {"simulated_minus_drilled"}
