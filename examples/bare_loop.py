"""A training loop of your own, with two parts of springtide: the batches and the checkpoints.

    springtide data prepare --recipe tiny
    torchrun --nproc-per-node 2 examples/bare_loop.py datasets/NAME checkpoints --steps 40

Kill it, start it again with another number of processes: it resumes at the newest checkpoint with the same batches, and so the
same losses up to the rounding of sums.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import springtide as st

GLOBAL_BATCH, WIDTH, SAVE_EVERY = 10, 64, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a prepared dataset's folder")
    parser.add_argument("folder", help="where checkpoints go: a folder, or an s3:// URL")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    vocab_size = json.loads(Path(options.dataset, "manifest.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with st.checkpoint.Checkpointer(options.folder) as checkpoints:
        step = checkpoints.restore(model, optimizer)
        batches = st.stream.batches(options.dataset, global_batch=GLOBAL_BATCH, rank=rank, size=size, step=step)
        while step < options.steps:
            loss = train_step(model, optimizer, next(batches))
            step += 1
            if rank == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, model, optimizer)
    dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: st.stream.Batch) -> float:
    """Train on this rank's rows; returns the loss of the whole batch. Ranks may have unequal numbers of rows:
    the loss is a sum, divided by the tokens of all ranks."""
    inputs, targets = torch.from_numpy(batch.ids[:, :-1]), torch.from_numpy(batch.labels[:, 1:])
    logits = model(inputs)
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = total / (GLOBAL_BATCH * targets.shape[1])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    dist.all_reduce(loss := loss.detach())
    return float(loss)


if __name__ == "__main__":
    main()
