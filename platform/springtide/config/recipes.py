"""Recipes: functions that return a whole config, named by size and by what they run on."""

from __future__ import annotations

from collections.abc import Callable

from springtide.config.amounts import Tokens
from springtide.config.data import ShardsConfig, StreamConfig
from springtide.config.schema import (
    CheckpointConfig,
    Config,
    ElasticConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)


def demo() -> Config:
    """A 4M-parameter model on Python's own source, two CPU workers: minutes on a laptop."""
    return Config(
        model=ModelConfig(num_layers=4, dim=256, num_heads=4, num_kv_heads=2, ffn_dim=688, max_sequence_length=256),
        shards=ShardsConfig(sequence_length=128, heldout_fraction=0.04),
        stream=StreamConfig(global_batch=8, lanes=4),
        # bit-equal at any number of workers: what a resize leaves in the loss is nothing at all
        parallel=ParallelConfig(reduction="fp64", reshard_after_forward=False),
        optim=OptimConfig(peak_lr=3e-3, warmup=Tokens(40_000), final_lr_ratio=0.05),
        train=TrainConfig(total=Tokens(600 * 8 * 128), micro_batch=4, eval_rows=256),
        checkpoint=CheckpointConfig(every_steps=50),
        elastic=ElasticConfig(min_workers=1, max_workers=2, notices="off"),
    )


def tiny() -> Config:
    """A 0.2M-parameter byte model that trains in seconds: for tests and first experiments."""
    return Config.model_validate(
        {
            "corpus": {"tokenizer": "bytes", "max_files": 40},
            "model": {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160},
            "shards": {"sequence_length": 64, "rows_per_group": 64, "groups_per_shard": 8, "heldout_fraction": 0.1},
            "stream": {"global_batch": 12, "window": 64},
            "optim": {"warmup": 12 * 64 * 10},
            "train": {"total": 12 * 64 * 60, "eval_rows": 16, "sample_tokens": 32},
            "checkpoint": {"every_steps": 20, "when_busy": "queue"},
            "elastic": {"notices": "off"},
        }
    )


def gpu_125m() -> Config:
    """GPT-2 small's size in a Llama shape, bf16, one to eight GPUs, 2.5B tokens."""
    return Config(
        model=ModelConfig(
            num_layers=12, dim=768, num_heads=12, num_kv_heads=12, ffn_dim=2048, max_sequence_length=2048
        ),
        shards=ShardsConfig(sequence_length=1024, rows_per_group=2048),  # ranged reads of 4 MiB
        stream=StreamConfig(global_batch=480),
        parallel=ParallelConfig(precision="bf16"),
        optim=OptimConfig(peak_lr=6e-4, warmup=Tokens(100_000_000), schedule="wsd"),
        train=TrainConfig(total=Tokens(2_500_000_000), micro_batch=32, eval_rows=512),
        checkpoint=CheckpointConfig(every_steps=500),
        elastic=ElasticConfig(min_workers=1, max_workers=8, gpus_per_worker=1),
    )


RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__: recipe for recipe in (demo, tiny, gpu_125m)}
