"""Hugging Face's Trainer, with two parts of springtide: the batches and the checkpoints.

    springtide data prepare --recipe tiny
    torchrun --nproc-per-node 2 examples/hf_trainer.py datasets/NAME checkpoints --steps 40

Kill it, start it again with another number of processes: it resumes at the newest checkpoint with the same batches, and so the
same losses up to the rounding of sums.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import springtide as st

GLOBAL_BATCH, SAVE_EVERY = 10, 10


class ElasticTrainer(Trainer):
    """A Trainer that resumes at ``checkpoints`` and trains on the rows of a springtide dataset."""

    def __init__(self, dataset: str, checkpoints: st.checkpoint.Checkpointer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dataset, self._checkpoints = dataset, checkpoints
        self.add_callback(SaveAndPrint(checkpoints))
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> ElasticTrainer:
        """Return an iterable; the Trainer iterates it when model, optimizer and scheduler exist."""
        return self

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Restore, and yield this rank's rows of each step to come. Ranks may have unequal numbers of rows: the Trainer divides
        the summed loss by the tokens of all ranks."""
        step = self._checkpoints.restore(self.model, self.optimizer.optimizer)
        self.state.global_step = self._globalstep_last_logged = step
        if step:  # the rate depends on the step alone
            state = {**self.lr_scheduler.state_dict(), "last_epoch": step - 1, "_step_count": step}
            self.lr_scheduler.load_state_dict(state)
            self.lr_scheduler.step()
        rank, size = self.args.process_index, self.args.world_size
        batches = st.stream.batches(self._dataset, global_batch=GLOBAL_BATCH, rank=rank, size=size, step=step)
        for _ in range(step, self.state.max_steps):
            batch = next(batches)
            yield {
                "input_ids": torch.from_numpy(batch.ids),
                "labels": torch.from_numpy(batch.labels),
            }  # the model shifts them


class SaveAndPrint(TrainerCallback):
    """Saves with springtide instead of the Trainer."""

    def __init__(self, checkpoints: st.checkpoint.Checkpointer) -> None:
        self._checkpoints = checkpoints

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if state.global_step % SAVE_EVERY == 0:
            self._checkpoints.save(state.global_step, parts["model"], parts["optimizer"].optimizer)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if state.is_world_process_zero and "loss" in parts["logs"]:
            print(f"step {state.global_step} loss {parts['logs']['loss']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a prepared dataset's folder")
    parser.add_argument("folder", help="where checkpoints go: a folder, or an s3:// URL")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    vocab_size = json.loads(Path(options.dataset, "manifest.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(
            unused,
            max_steps=options.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            save_strategy="no",
            logging_steps=1,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        )
        with st.checkpoint.Checkpointer(options.folder) as checkpoints:
            ElasticTrainer(options.dataset, checkpoints, model=model, args=arguments).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
