"""Memory and time of a step by arithmetic: against the model itself, against the step on tensors without memory, and by what
must hold of any roofline."""

from __future__ import annotations

from typing import Any

import pytest

from springtide import config as configs
from springtide.config import Config
from springtide.config.cluster_file import NodeType, parse_cluster
from springtide.config.recipes import RECIPES
from springtide.model import flops_per_token, hardware_flops_per_token, num_parameters, skeleton
from springtide.planning.arithmetic import StepTime, model_size, predicted_step_bytes, state_bytes, step_time
from springtide.planning.step_memory import predicted_bytes

NODE = """
node_types:
  - {name: a, devices: 8, device: H100, host_memory: 2TB, prices: {spot: 1},
     links: {inside: 450GB, between: 50GB}, max_nodes: 8}
"""
ESTIMATED: list[tuple[str, int, int, int, dict[str, Any], int]] = [
    ("demo", 4, 2, 1, {}, 130_573_836),
    ("demo", 4, 2, 4, {"parallel.strategy": "ddp", "parallel.reduction": "fp32"}, 98_964_956),
    ("demo", 4, 2, 4, {"parallel.strategy": "zero2", "parallel.reduction": "fp32"}, 66_309_324),
    ("demo", 4, 2, 4, {"parallel.strategy": "zero3", "parallel.reduction": "fp32"}, 54_701_260),
    ("demo", 4, 2, 1, {"parallel.recompute": "selective", "parallel.reduction": "fp32"}, 89_128_460),
    ("demo", 4, 2, 1, {"parallel.recompute": "full", "parallel.reduction": "fp32"}, 78_233_100),
    ("llama3_8b", 4, 1, 8, {}, 18_039_113_944),
    ("llama3_8b", 2, 2, 8, {}, 18_042_429_664),
    ("llama3_8b", 2, 1, 64, {}, 12_880_575_632),
    ("llama3_8b", 4, 2, 1, {}, 43_027_491_088),
    ("gpu_1b", 4, 2, 8, {}, 4_806_012_176),
    ("gpu_1b", 4, 2, 8, {"parallel.recompute": "none"}, 5_712_112_912),
    ("gpu_1b", 4, 2, 8, {"parallel.recompute": "full"}, 4_033_211_664),
    ("gpu_1b", 4, 2, 8, {"parallel.strategy": "ddp"}, 10_052_312_368),
    ("gpu_125m", 2, 2, 8, {}, 1_717_791_940),
    ("gpu_125m", 4, 2, 1, {}, 2_733_872_908),
    ("qwen3_4b", 2, 1, 8, {}, 7_431_619_740),
]
"""Recipe, layers, micro-batch, workers, changes -> what ``predicted_bytes`` says, which takes seconds for each."""


SHAPES = ("tiny", "gemma2_2b", "olmo3_7b", "qwen3_4b")
"""Recipes with all that the size of a decoder depends on: windows, norms of queries, norms on both sides, tied heads."""


def config_of(name: str, layers: int, micro_batch: int, changes: dict[str, Any]) -> Config:
    return configs.recipe(name).override({"model.num_layers": layers, "train.micro_batch": micro_batch, **changes})


def arithmetic(config: Config, workers: int) -> int:
    size = model_size(config.model, config.corpus.vocab_size, config.shards.sequence_length)
    return predicted_step_bytes(config, size, workers)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in SHAPES)) for name in RECIPES]
)
def test_size_and_work_of_a_model_are_its_own(name: str) -> None:
    config = configs.recipe(name)
    length = config.shards.sequence_length
    model, size = (
        skeleton(config.model, config.corpus.vocab_size),
        model_size(config.model, config.corpus.vocab_size, length),
    )
    assert size.num_parameters == num_parameters(model)
    assert size.flops_per_token == pytest.approx(flops_per_token(model, length), rel=1e-9)
    for recompute in ("none", "full"):
        expected = hardware_flops_per_token(model, length, recompute)
        assert size.hardware_flops_per_token(recompute) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "layers", "micro_batch", "workers", "changes", "estimated"), ESTIMATED)
def test_memory_is_within_a_tenth_of_the_estimate(
    name: str, layers: int, micro_batch: int, workers: int, changes: dict[str, Any], estimated: int
) -> None:
    assert arithmetic(config_of(name, layers, micro_batch, changes), workers) == pytest.approx(estimated, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layers", "micro_batch", "workers", "changes", "estimated"), ESTIMATED)
def test_the_estimate_is_still_what_arithmetic_is_held_to(
    name: str, layers: int, micro_batch: int, workers: int, changes: dict[str, Any], estimated: int
) -> None:
    config = config_of(name, layers, micro_batch, changes)
    assert predicted_bytes(config, config.corpus.vocab_size, None, workers) == pytest.approx(estimated, rel=0.01)


def test_a_checkpoint_holds_weights_moments_and_averages() -> None:
    config = configs.recipe("gpu_1b")
    size = model_size(config.model, config.corpus.vocab_size, config.shards.sequence_length)
    assert state_bytes(size, config.optim) == 12 * size.num_parameters
    averaged = config.override({"optim.ema_half_life": "1M"})
    assert state_bytes(size, averaged.optim) == 16 * size.num_parameters
    small = config.override({"optim.moments": "int8"})
    assert state_bytes(size, small.optim) == 6 * size.num_parameters


def parts(workers: int, **changes: Any) -> StepTime:
    node: NodeType = parse_cluster(NODE.encode(), "c.yaml").node_types[0]
    config = configs.recipe("gpu_1b").override({name.replace("__", "."): value for name, value in changes.items()})
    size = model_size(config.model, config.corpus.vocab_size, config.shards.sequence_length)
    return step_time(config, size, node, workers)


def test_twice_the_workers_halve_products_and_add_links() -> None:
    one, two = parts(1), parts(2)
    assert two.products_s == pytest.approx(one.products_s / 2)
    assert one.links_s == 0 < two.links_s


def test_links_between_nodes_are_the_slower_ones() -> None:
    # a ring over 16 moves 15/16 of the bytes, one over 8 7/8; between nodes at a ninth of the speed
    assert parts(16, stream__global_batch=1024).links_s == pytest.approx(
        parts(8, stream__global_batch=512).links_s * (15 / 16) / (7 / 8) * 9
    )


def test_whole_weights_are_gathered_once_a_step_with_zero1() -> None:
    # zero3: two gathers and one reduction of each of 8 micro-batches; zero1: one of each; in bf16 and fp32
    zero3, zero1 = parts(8), parts(8, parallel__strategy="zero1")
    assert zero3.links_s / zero1.links_s == pytest.approx(8 * (2 * 2 + 4) / (2 + 4))


def test_a_gpu_hides_communication_behind_computation_and_a_cpu_does_not() -> None:
    gpu = StepTime(2.0, 1.0, 1.5, blocks=10)
    assert gpu.step_s(1.0) == pytest.approx(3.0 + 0.15)
    assert gpu._replace(blocks=0).step_s(0.5) == pytest.approx(6.0 + 1.5)


def test_a_host_that_begins_operations_slower_than_a_device_does_them_decides() -> None:
    small = StepTime(2.0, 1.0, 0.0, blocks=10, host_s=5.0)
    assert small.step_s(0.5) == pytest.approx(10.0)
    assert small._replace(blocks=0).step_s(0.5) == pytest.approx(16.0)
    eager: dict[str, Any] = {"parallel__compile": False}
    one, recomputed = (parts(1, parallel__recompute=which, **eager) for which in ("none", "full"))
    assert recomputed.host_s > one.host_s > 8 * parts(1, parallel__compile=True).host_s
    deeper = parts(1, model__num_layers=48, parallel__recompute="none", **eager)
    assert 1.8 * one.host_s < deeper.host_s < 2 * one.host_s


def test_each_block_is_a_message_of_its_own_between_cpus() -> None:
    gpus = {"elastic__gpus_per_worker": 1}
    cpus = {"elastic__gpus_per_worker": 0}
    more = parts(8, **cpus).links_s - parts(8, **gpus).links_s
    once = parts(8, parallel__strategy="zero1", **cpus).links_s - parts(8, parallel__strategy="zero1", **gpus).links_s
    assert more / once == pytest.approx(8 * 3 / 2)  # zero3: two gathers and one reduction of each of 8 micro-batches


@pytest.mark.parametrize("blocks", [0, 24])
@pytest.mark.parametrize("measured_s", [2.0, 5.0, 50.0])
def test_the_efficiency_of_a_measured_step_gives_that_step(blocks: int, measured_s: float) -> None:
    one = StepTime(2.0, 1.0, 0.5, blocks)
    assert one.step_s(one.efficiency(measured_s)) == pytest.approx(measured_s)


def test_a_step_that_links_alone_would_fill_says_nothing_of_the_device() -> None:
    one = StepTime(2.0, 1.0, 9.0, 0)
    assert one.step_s(one.efficiency(5.0)) == pytest.approx(9.0, rel=1e-3)
