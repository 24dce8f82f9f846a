"""The peers of ``throughput.py``; those with dependencies of their own run in .venv-peers.

python throughput_peers.py bare_loop|hf_trainer|lightning '{"model": ..., "rows": FILE, ...}'    prints one line of JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

import claims
import numpy as np
import torch
import torch.nn.functional as F
from stream_peers import let_torchvision_load
from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.model import build

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
ON_GPU = torch.cuda.is_available()


def loss_of(model: nn.Module, rows_BL: Tensor) -> Tensor:
    """As one writes it."""
    return F.cross_entropy(model(rows_BL[:, :-1]).flatten(0, 1).float(), rows_BL[:, 1:].flatten())


def bare_loop(model: nn.Module, rows: Tensor, batch: int, steps: int) -> list[float]:
    """The loop one would write by hand."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    batches, ends = rows.split(batch), []
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
            loss = loss_of(model, batches[step % (len(batches) - 1)].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        ends.append(time.perf_counter())
    return ends


def hf_trainer(model: nn.Module, rows: Tensor, batch: int, steps: int) -> list[float]:
    """transformers.Trainer as it comes, told the same hyperparameters."""
    let_torchvision_load()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, rows_BL: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.inner, rows_BL)}

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            bf16=ON_GPU,
            use_cpu=not ON_GPU,
            save_strategy="no",
            report_to=[],
            logging_steps=10,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        data = [{"rows_BL": row} for row in rows]
        Trainer(model=WithLoss(), args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return ends


def lightning(model: nn.Module, rows: Tensor, batch: int, steps: int) -> list[float]:
    """lightning.Trainer as it comes, without logger and checkpoints."""
    let_torchvision_load()
    import lightning as L

    ends: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, rows_BL: Tensor, _index: int) -> Tensor:
            return loss_of(self.inner, rows_BL)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(
                self.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
            )

        def on_train_batch_end(self, *_arguments: Any) -> None:
            ends.append(time.perf_counter())

    trainer = L.Trainer(
        max_steps=steps,
        accelerator="gpu" if ON_GPU else "cpu",
        devices=1,
        precision="bf16-mixed" if ON_GPU else "32-true",
        # a fused optimizer does not go with its own clipping in mixed precision
        gradient_clip_val=CLIP if not ON_GPU else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=batch, shuffle=True))
    return ends


def main() -> None:
    """Train, and print when each step ended."""
    client, told = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = build(ModelConfig(**told["model"]), told["vocabulary"])
    rows = torch.from_numpy(np.load(told["rows"]))
    ends = {"bare_loop": bare_loop, "hf_trainer": hf_trainer, "lightning": lightning}[client](
        model, rows, told["batch"], told["steps"]
    )
    print(json.dumps({"ends": ends, "peak_mib": claims.peak_mib()}))


if __name__ == "__main__":
    main()
