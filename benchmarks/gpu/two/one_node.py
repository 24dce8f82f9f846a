"""One node of eight GPUs: llama3_8b by torchrun, the same under Ray, and the layouts beside each other.

NOT RUN YET by anybody of this project. It answers:

    torchrun    tokens/s a GPU, MFU and peak memory of llama3_8b over eight GPUs; its log (NCCL_DEBUG=INFO) names P2P, NVLS
    ray         the same under Ray, with a profile: the difference is the price of Ray
    zero1, zero2, zero3    what holding weights or gradients whole in a step wins

Expected on 8 x H100: within 10-25 % of torchtitan's 6,500 tokens/s a GPU for the same model and length; Ray within 2 %.
TEXT is any source of corpus.source with 50 MB or more; TOKENIZER a tokenizer.json, Llama 3's or another of 128k ids.

    python benchmarks/gpu/two/one_node.py TEXT TOKENIZER [--gpus 8] [--root FOLDER]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "platform"))

from springtide.store import Folder
from springtide.track.journal import last_steps, read_journal

STEPS, ROWS, LENGTH, WARM_UP = 38, 64, 8192, 8


def main() -> None:
    """Prepare, train each way, print what the journals say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("tokenizer")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--root", default="runs")
    options = parser.parse_args()
    config = Path(options.root) / "one-node.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    call(
        *("springtide", "data", "prepare", "--recipe", "llama3_8b", "--corpus.source", options.text),
        *("--corpus.tokenizer", options.tokenizer, "--shards.token-type", "uint32", "--run.id", "torchrun"),
        *("--run.root", options.root, "--stream.global-batch", str(ROWS), "--train.total", str(STEPS * ROWS * LENGTH)),
        *("--stream.max-epochs", "1e6"),  # nobody uses the model
        *("--optim.warmup", str(4 * ROWS * LENGTH), "--checkpoint.every-steps", "0", "--save", str(config)),
    )
    launch = ("torchrun", "--nproc-per-node", str(options.gpus), "-m", "springtide.training", "--config", str(config))
    call(*launch, NCCL_DEBUG="INFO")
    show(options.root, "torchrun", options.gpus)
    on_ray = ("springtide", "train", "--config", str(config), "--elastic.max-workers", str(options.gpus))
    call(*on_ray, "--run.id", "ray", "--profile", "5")
    show(options.root, "ray", options.gpus)
    for strategy in ("zero1", "zero2"):
        call(*on_ray, "--run.id", strategy, "--parallel.strategy", strategy)
        show(options.root, strategy, options.gpus)


def call(*command: str, **variables: str) -> None:
    """Run it, its output as it comes; a layout that does not fit is told, and the next is tried."""
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, env=os.environ | variables, check=False)
    if done.returncode:
        print(f"status {done.returncode}: {command[0]}", flush=True)


def show(root: str, name: str, gpus: int) -> None:
    """Tokens/s a GPU, MFU, peak memory, first step."""
    steps = last_steps(read_journal(Folder(root) / name))
    if len(steps) <= WARM_UP:
        print(f"{name}: trained {len(steps)} steps", flush=True)
        return
    rate = statistics.median(step.tokens_per_s for step in steps[WARM_UP:]) / gpus
    mfu, peak = statistics.median(step.mfu for step in steps[WARM_UP:]), max(step.memory_bytes for step in steps) / 1e9
    first = steps[0].step_time_s
    print(f"{name}: {rate:.0f} tokens/s a GPU, MFU {mfu:.3f}, peak {peak:.1f} GB, first step {first:.1f} s", flush=True)


if __name__ == "__main__":
    main()
