"""Peak memory of LoRA on small devices: one process without Ray, one CPU thread, one row a step.

Models in the shapes of Qwen 2.5 0.5B and 1.5B, whose frozen weights are held in bf16, and of Qwen 3 4B, whose blocks are held
in 4 bits (``model.base_precision``). Weights are random: they take the same memory, and nobody uses the model. An adapter of
rank 8 on every matrix of the blocks; products in fp32, blocks recomputed in backward. The peak is that of the whole process,
Python and torch included, over filling the weights and some steps. A run reads its weights a part at a time, as they are filled
here. It also saves; with ``checkpoint.stage`` empty no copy is made for that. glibc returns large tensors to the system as soon
as they are freed (MALLOC_MMAP_THRESHOLD_), as docs/how-to/small-devices.md advises.

    python benchmarks/small_devices.py [--quick] [--json] [--steps 2] [--only lora_0_5b]
"""

from __future__ import annotations

import os
import time
from typing import Any

import claims

LENGTH = 512
QWEN = {"max_sequence_length": LENGTH, "tied_head": True, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "lora_0_5b": {
        **QWEN,
        "num_layers": 24,
        "dim": 896,
        "ffn_dim": 4864,
        "num_heads": 14,
        "num_kv_heads": 2,
        "qkv_bias": True,
        "base_precision": "bf16",
    },
    "lora_1_5b": {
        **QWEN,
        "num_layers": 28,
        "dim": 1536,
        "ffn_dim": 8960,
        "num_heads": 12,
        "num_kv_heads": 2,
        "qkv_bias": True,
        "base_precision": "bf16",
    },
    "qlora_4b": {
        **QWEN,
        "num_layers": 36,
        "dim": 2560,
        "ffn_dim": 9728,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "qk_norm": "head",
        "base_precision": "nf4",
    },
}
GOALS = {"lora_0_5b": 2.0, "lora_1_5b": 4.0, "qlora_4b": 8.0}
"""Most memory [GiB]."""
QUICK = {
    "num_layers": 2,
    "dim": 64,
    "ffn_dim": 160,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 0,
    "vocab_size": 512,
}


def measured(shape: dict[str, Any], length: int, steps: int) -> dict[str, Any]:
    """Train for some steps in this process, which has done nothing else."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from springtide.config import Config
    from springtide.distributed import world as world_of
    from springtide.distributed.fsdp import parallelize
    from springtide.model import make, num_parameters
    from springtide.optim.build import optimizer_of
    from springtide.optim.parameter_groups import check_groups, freeze
    from springtide.optim.schedule import set_learning_rate
    from springtide.training import StepSetup, Work, train_step
    from springtide.training.state import initialize

    changes = {"adapter": "lora", "adapter_rank": 8, **shape}
    settings = {f"model.{name}": value for name, value in changes.items()}
    config = Config().override({**settings, "parallel.recompute": "full", "shards.sequence_length": length})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, vocab = world_of("cpu"), config.model.vocab_size
    begin, imports = time.perf_counter(), claims.peak_mib()
    model = make(config.model, vocab)
    check_groups(model, config.optim)
    freeze(model, config.optim)
    size = num_parameters(model)
    model = parallelize(model, config.parallel, world)
    optimizer = optimizer_of(model, config.optim)
    initialize(model, config.model, vocab)
    filled, losses, times = time.perf_counter() - begin, [], []
    held = claims.peak_mib()
    draw, setup = torch.Generator().manual_seed(0), StepSetup(model, optimizer, world, clip_norm=1.0)
    for _ in range(steps):
        begin = time.perf_counter()
        rows = torch.randint(vocab, (1, length + 1), generator=draw)
        set_learning_rate(optimizer, 1e-4)
        result = train_step(setup, Work(rows, [slice(0, 1)], length))
        assert result.updated
        losses.append(result.loss)
        times.append(round(time.perf_counter() - begin, 1))
    dist.destroy_process_group()
    found = {"parameters": size, "losses": losses, "step_s": times, "fill_s": round(filled, 1)}
    return {**found, "imports_mib": round(imports), "filled_mib": round(held)}


def each(shapes: dict[str, dict[str, Any]], length: int, steps: int) -> dict[str, Any]:
    """``measured`` of several models in one process, whose peak tells nothing of one of them."""
    return {"found": [measured(shape, length, steps) for shape in shapes.values()]}


def main() -> None:
    options = claims.options(__doc__, 1, "only", steps=(2, 1))
    shapes = {name: shape for name, shape in SHAPES.items() if options.only in ("", name)}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # for the processes that are measured
    if options.quick:
        small = {name: {**shape, **QUICK, "max_sequence_length": 32} for name, shape in shapes.items()}
        together = claims.alone(each, small, 32, int(options.steps))
        figures = [{**found, "peak_mib": together["peak_mib"]} for found in together["found"]]
    else:
        figures = [claims.alone(measured, shape, LENGTH, int(options.steps)) for shape in shapes.values()]
    told = []
    for name, found in zip(shapes, figures, strict=True):
        peak = found["peak_mib"] / 1024
        print(
            f"{name}: {found['parameters'] / 1e9:.3f}B parameters, peak {peak:.2f} GiB"
            f" ({found['filled_mib'] / 1024:.2f} when the weights are there, {found['imports_mib'] / 1024:.2f} before),"
            f" filled in {found['fill_s']} s, steps of {found['step_s']} s, losses {[round(one, 3) for one in found['losses']]}"
        )
        told.append(claims.claim(f"{name}_peak_gib", peak, GOALS[name], "lower", found))
    claims.show(options, told)


if __name__ == "__main__":
    main()
