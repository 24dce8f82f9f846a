"""Lightning's Trainer, with two parts of springtide: the batches and the checkpoints.

    springtide data prepare --recipe tiny
    torchrun --nproc-per-node 2 examples/lightning_loop.py datasets/NAME checkpoints --steps 40

Kill it, start it again with another number of processes: it resumes at the newest checkpoint with the same batches, and so the
same losses up to the rounding of sums.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
from torch import nn

import springtide as st

GLOBAL_BATCH, WIDTH, SAVE_EVERY = 10, 64, 10


class NextToken(lightning.LightningModule):
    """A model of the next token from the last one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.steps_done = 0
        self.net = nn.Sequential(nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size))

    def training_step(self, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of this rank's rows, inputs and targets (n, L). Ranks may have unequal numbers, Lightning averages
        gradients: the loss is a sum, divided by the tokens of one rank's mean share."""
        inputs, targets = rows
        total = nn.functional.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        return total * self.trainer.world_size / (GLOBAL_BATCH * targets.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ExactBatches:
    """The rows of a springtide dataset, the same at any number of processes, from the step that ``module`` is at."""

    def __init__(self, dataset: str, module: NextToken, steps: int) -> None:
        self._dataset, self._module, self._steps = dataset, module, steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first, trainer = self._module.steps_done, self._module.trainer
        rank, size = trainer.global_rank, trainer.world_size
        batches = st.stream.batches(self._dataset, global_batch=GLOBAL_BATCH, rank=rank, size=size, step=first)
        for _ in range(first, self._steps):
            batch = next(batches)
            yield torch.from_numpy(batch.ids[:, :-1]), torch.from_numpy(batch.labels[:, 1:])


class Checkpoints(lightning.Callback):
    """Saves and restores with springtide instead of Lightning."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_fit_start(self, trainer: lightning.Trainer, module: NextToken) -> None:
        # not in on_train_start: Lightning has the first batch by then
        self._checkpoints = st.checkpoint.Checkpointer(self._folder)
        module.steps_done = self._checkpoints.restore(module, trainer.optimizers[0])

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: NextToken, outputs: dict[str, torch.Tensor], *_: object
    ) -> None:
        module.steps_done += 1
        loss = trainer.strategy.reduce(outputs["loss"], reduce_op="mean")
        if trainer.is_global_zero:
            print(f"step {module.steps_done} loss {float(loss):.6f}", flush=True)
        if module.steps_done % SAVE_EVERY == 0:
            self._checkpoints.save(module.steps_done, module, trainer.optimizers[0])

    def on_train_end(self, trainer: lightning.Trainer, module: NextToken) -> None:
        self._checkpoints.close()

    def on_exception(self, trainer: lightning.Trainer, module: NextToken, error: BaseException) -> None:
        self._checkpoints.close(wait=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a prepared dataset's folder")
    parser.add_argument("folder", help="where checkpoints go: a folder, or an s3:// URL")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    torch.manual_seed(0)
    module = NextToken(json.loads(Path(options.dataset, "manifest.json").read_text())["vocab_size"])
    trainer = lightning.Trainer(
        max_epochs=1,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[Checkpoints(options.folder)],
        enable_checkpointing=False,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ExactBatches(options.dataset, module, options.steps))


if __name__ == "__main__":
    main()
