"""What springtide costs a step: tokens/s of the Ray path, and of the loop under torchrun, over a bare, hand-written FSDP2 loop.

Same model, same batch, two gloo processes with one thread each, rounds alternating in one run. The bare loop has its data in
memory and neither counts, checks, logs nor saves; ours does all it does for a user, but saves nothing in the timed steps. The
claim compares the same arithmetic, float32 sums over whole micro-batches; beside it stands ``exact``, the demo as it is, whose
float64 sums and smaller micro-batches make it bit-equal at any world size.

    python benchmarks/step_overhead.py [--quick] [--json] [--rounds 4] [--steps 40]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import springtide as st
from springtide import config as configs
from springtide.config import Config
from springtide.model import build
from springtide.ray.cluster.session import cluster
from springtide.shards import TRAIN, SplitReader, load_manifest
from springtide.storage import Folder

WORLD_SIZE = 2
WARM_UP_STEPS = 8
GOAL = 0.98
SMALL = {"corpus.max_files": 40, "model.num_layers": 2, "model.dim": 64, "model.ffn_dim": 176}
"""For --quick."""


def bare(rank: int, config: Config, meet: str, steps: int, results: Any) -> None:
    """The loop one would write by hand for exactly this model and this batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    dataset = Folder(config.shards.dataset)
    manifest = load_manifest(dataset)
    rows = np.arange(rank, config.stream.global_batch * 8, WORLD_SIZE)
    data = torch.from_numpy(SplitReader(dataset, manifest, TRAIN).read(rows).tokens.astype(np.int64))
    batches = data.split(config.stream.global_batch // WORLD_SIZE)

    model = build(config.model, manifest.vocab_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=config.parallel.strategy == "zero3")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    times = []
    for step in range(steps):
        begin = time.perf_counter()
        tokens = batches[step % len(batches)]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - begin)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        results.put(times)


def bare_step_s(config: Config, steps: int, meet: str) -> float:
    """Mean seconds of a step of the bare loop, warm-up left out. ``meet``: where its ranks find each other."""
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=bare, args=(rank, config, meet, steps, results)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    times = results.get(timeout=600)
    for process in processes:
        process.join()
    return statistics.fmean(times[WARM_UP_STEPS:])


def ours_step_s(config: Config, name: str) -> tuple[float, float]:
    """Mean seconds of a step of the Ray path, and of the wait for data in it, warm-up left out."""
    run = st.train(config.override({"run.id": name}))
    steps = run.steps[WARM_UP_STEPS:]
    assert all(step.world_size == WORLD_SIZE for step in steps)
    return statistics.fmean(step.step_time_s for step in steps), statistics.fmean(step.data_wait_s for step in steps)


def torchrun_step_s(config: Config, name: str) -> float:
    """Mean seconds of a step of the same loop under torchrun, without Ray, warm-up left out."""
    config = config.override({"run.id": name})
    file = Path(config.run.root) / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(configs.dump(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    subprocess.run(
        [*torchrun, "-m", "springtide.training", "--config", str(file)], check=True, stdout=subprocess.DEVNULL
    )
    steps = st.open_run(f"{config.run.root}/{name}").steps[WARM_UP_STEPS:]
    assert all(step.world_size == WORLD_SIZE for step in steps)
    return statistics.fmean(step.step_time_s for step in steps)


def measure(folder: str, rounds: int, steps: int, small: bool) -> dict[str, Any]:
    """Alternate all for ``rounds`` rounds; who goes first changes every round."""
    config = st.recipes.demo().override(
        {
            "shards.root": f"{folder}/datasets",
            "run.root": f"{folder}/runs",
            "train.total": steps * st.recipes.demo().tokens_per_step,
            "stream.max_epochs": 1e6,  # nobody uses the model
            "optim.warmup": 0,
            "train.eval_tokens": 0,
            "train.sample_tokens": 0,
            "checkpoint.every_steps": 0,
            "elastic.min_workers": WORLD_SIZE,
            "elastic.max_workers": WORLD_SIZE,
            "parallel.threads": 1,
            "track.progress": False,
            **(SMALL if small else {}),
        }
    )
    exact = st.prepare(config)
    ours = exact.override({"parallel.reduction": "fp32", "stream.lanes": 0})
    table = []
    with cluster(exact):
        for number in range(rounds):
            times: dict[str, float] = {}
            order = ("bare", "ours", "torchrun", "exact")
            for who in reversed(order) if number % 2 else order:
                if who == "bare":
                    times["bare"] = bare_step_s(ours, steps, f"file://{folder}/group-{number}")
                elif who == "torchrun":
                    times["torchrun"] = torchrun_step_s(ours, f"torchrun-{number}")
                else:
                    config = ours if who == "ours" else exact
                    times[who], times[f"{who}_data_wait"] = ours_step_s(config, f"{who}-{number}")
            ratios = {"ratio": "ours", "torchrun_ratio": "torchrun", "exact_ratio": "exact"}
            table.append({**times, **{ratio: times["bare"] / times[who] for ratio, who in ratios.items()}})
            print(
                f"round {number + 1}: bare {times['bare']:.4f} s a step, ours {times['ours']:.4f} s "
                f"({times['ours_data_wait'] * 1e3:.2f} ms waiting for data), ratio {table[-1]['ratio']:.4f}; "
                f"torchrun {times['torchrun']:.4f} s, ratio {table[-1]['torchrun_ratio']:.4f}; "
                f"exact {times['exact']:.4f} s, ratio {table[-1]['exact_ratio']:.4f}",
                flush=True,
            )
    medians = {
        name: statistics.median(row[name] for row in table) for name in ("ratio", "torchrun_ratio", "exact_ratio")
    }
    return {"rounds": table, **medians}


def main() -> None:
    """Print the table and the claim."""
    options = claims.options(__doc__, rounds=4, steps=(40, WARM_UP_STEPS + 4))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(folder, int(options.rounds), int(options.steps), options.quick)
    print(f"exact sums: {found['exact_ratio']:.4f}")
    detail = {**found, "torch": torch.__version__}
    judged = [
        claims.claim("step_overhead", found["ratio"], GOAL, "higher", detail),
        claims.claim("step_overhead_torchrun", found["torchrun_ratio"], GOAL, "higher", detail),
    ]
    claims.show(options, judged)


if __name__ == "__main__":
    main()
