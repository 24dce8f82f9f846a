"""Benchmarks that need no Ray still run; those that do are in tests/elastic."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from quick import BENCHMARKS, claims, claims_here, traces

from springtide.config.recipes import RECIPES

ON_RAY = {"drilled", "kill_gap", "node_reads", "prepare", "recovery", "startup", "step_overhead", "sweep"}
"""In tests/elastic/test_benchmarks.py."""
CLAIMS = {
    "checkpoint": {
        *("save_stall_vs_sync", "save_step_slowdown", "save_peak_memory_vs_shard"),
        *("save_vs_raw_put", "load_vs_raw_get", "memory_vs_store_load"),
    },
    "continual": {
        *(f"forgetting_{way}_vs_alone" for way in ("replay", "l2sp", "ewc")),
        *(f"new_loss_{way}_vs_alone" for way in ("replay", "l2sp", "ewc")),
    },
    "control_plane": {
        *("waiting_share_of_a_core", "chain_and_journal_share_of_a_step", "observers_share_of_a_step"),
    },
    "distill": {
        *("distilled_vs_alone_loss", "stored_vs_online_loss", "stored_vs_online_all_loss"),
        "stored_vs_online_tokens_per_s",
    },
    "finetune": {"lora_vs_peft", "lora_memory_vs_peft", "packed_vs_padded"},
    "growth": {"growth_layers_over_flops", "growth_width_over_flops", "growth_length_over_flops"},
    "order": {*(f"order_lag1_{recipe}" for recipe in RECIPES), "order_seek_1000_s", "order_verify_minutes"},
    "layouts": {"layouts_loss_over_tolerance", "bytes_predicted_off"},
    "export": {"export_memory_vs_largest_tensor", "export_vs_copy"},
    "page": {
        *("page_build_s", "page_read_and_build_s", "page_mb"),
        *("run_status_s", "run_status_look_s", "run_list_s"),
    },
    "plan": {"plan_memory_off", "plan_time_off", "plan_time_off_processor"},
    "small_devices": {"lora_0_5b_peak_gib", "lora_1_5b_peak_gib", "qlora_4b_peak_gib"},
}
PEERS = (BENCHMARKS.parent / ".venv-peers").exists()


@pytest.mark.parametrize("benchmark", sorted(CLAIMS))
@pytest.mark.full
def test_a_benchmark_runs_and_ends_with_its_claims(benchmark: str) -> None:
    assert claims(benchmark).keys() == CLAIMS[benchmark]


@pytest.mark.full
def test_scale_says_how_each_cost_grows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: it imports nearly all of the package."""
    state = {"save", "commit", "retention", "restore", "lookup", "pieces"}
    control = {"start", "poll", "compare", "connections", "queue", "feed_start"}
    data = {"open", "seek", "journal", "report"}
    found = claims_here("scale", monkeypatch, capsys)
    assert found.keys() == {f"exponent_{what}" for what in state | control | data}


@pytest.mark.full
def test_prepare_growth_counts_what_is_asked_of_a_store(s3: str) -> None:
    found = claims("prepare_growth", "--store", f"s3://shards/{uuid.uuid4().hex}")
    assert found.keys() == {
        *("exponent_prepare_requests", "exponent_prepare_bytes_read", "exponent_prepare_cpu"),
        *("prepare_read_over_text", "prepare_task_mib", "prepare_killed_same_bytes", "open_s", "open_private_mib"),
    }


@pytest.mark.full
def test_goodput_is_simulated_on_every_record_there_is(tmp_path: Path) -> None:
    found = claims("goodput", "--traces", str(traces(tmp_path)))
    assert found.keys() == {
        *("goodput_p3_notice", "goodput_p3_gpu_costs", "goodput_2048_reliable"),
        *("deadline_met_by_h", "deadline_cost_vs_on_demand"),
    }
    assert all(0 < claim["value"] <= 1 for claim in found.values())


@pytest.mark.full
def test_throughput_says_who_is_left_out() -> None:
    found = claims("throughput")
    assert found.keys() >= {"vs_bare_loop", "vs_best"}
    assert ("left out" in found["vs_best"]["detail"]) != PEERS


@pytest.mark.full
def test_stream_says_who_is_left_out() -> None:
    found = claims("stream")
    assert "first_batch_seek" in found
    assert ("left out" in found["first_batch_seek"]["detail"]) != PEERS


def test_every_benchmark_is_run_by_a_test() -> None:
    with_claims = {path.stem for path in BENCHMARKS.glob("*.py") if "claims.show(" in path.read_text()}
    assert with_claims == {*CLAIMS, *ON_RAY, *("goodput", "prepare_growth", "scale", "stream", "throughput")}
    text = (Path(__file__).parents[1] / "elastic" / "test_benchmarks.py").read_text()
    assert [name for name in ON_RAY if f'claims("{name}"' not in text] == []


NEVER_ENDS = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
import claims

def measure():
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    claims.alone(measure)
"""


def test_who_measures_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    """Also where that one is killed: a measurement that was given up must not go on beside the next."""
    program = tmp_path / "never_ends.py"
    program.write_text(NEVER_ENDS.format(benchmarks=str(BENCHMARKS)))
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        measuring = psutil.Process(int(asking.stdout.readline()))
        asking.kill()
        try:
            measuring.wait(60)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                measuring.kill()
