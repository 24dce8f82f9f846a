"""A replica of torchft, the third peer of ``recovery.py``; runs in .venv-peers.

    python recovery_peers.py '{"model": ..., "rows": FILE, ...}'    appends a line of JSON to a log for each step that it tries

The loop of torchft's train_ddp.py, with managed all-reduce of all gradients at once in place of its DistributedDataParallel,
which on gloo ends the survivors of a kill (AssertionError in ddp.py). As there, a replica keeps no position in the data: one
that is started anew reads its part from the beginning. SIGTERM ends it after its step; torchft itself knows no notice.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

from springtide.config.engine import ModelConfig
from springtide.model import build

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


def loss_of(model: nn.Module, rows_BL: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens."""
    return F.cross_entropy(model(rows_BL[:, :-1]).flatten(0, 1).float(), rows_BL[:, 1:].flatten())


def average(manager: Manager, model: nn.Module) -> None:
    """Replace the gradients by their mean over the replicas that are there."""
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    flat = torch.cat([one.flatten() for one in grads])
    manager.allreduce(flat).wait()
    for one, part in zip(grads, flat.split([one.numel() for one in grads]), strict=True):
        one.copy_(part.view_as(one))


class Replica:
    """One replica group of one process."""

    def __init__(self, told: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.told, self.leaves = told, False
        self.model = build(ModelConfig(**told["model"]), told["vocabulary"])
        inner = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=told["gloo_s"])),
            min_replica_size=1,
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": inner.state_dict()},
            replica_id=f"recovery_{told['replica']}",
            timeout=timedelta(seconds=told["manager_s"]),
            heartbeat_interval=timedelta(milliseconds=told["heartbeat_ms"]),
            lighthouse_addr=told["lighthouse"],
            store_addr="127.0.0.1",
            store_port=self._store.port,
            hostname="127.0.0.1",
            rank=0,
            world_size=1,
        )
        self._inner, self.optimizer = inner, OptimizerWrapper(self.manager, inner)

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["optimizer"])

    def train(self) -> None:
        """Try steps until told to end."""
        told = self.told
        rows, heldout = (torch.from_numpy(np.load(told[name])) for name in ("rows", "heldout"))
        share = told["batch"] // told["replicas"]
        with open(told["log"], "a", buffering=1) as log:
            number = 0
            while not self.leaves:
                first = number * told["batch"] + told["replica"] * share
                batch = rows[torch.arange(first, first + share) % len(rows)]
                begin, before = time.perf_counter(), self.manager.current_step()
                self.optimizer.zero_grad()  # begins the quorum
                loss = loss_of(self.model, batch)
                loss.backward()
                average(self.manager, self.model)
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                step = self.manager.current_step()
                tried = {
                    "time_s": time.time(),
                    "step_time_s": time.perf_counter() - begin,
                    "batch": number,
                    "step": step,
                    "committed": step > before,
                    "counts": self.manager.is_participating(),
                    "workers": self.manager.num_participants(),
                    "quorum": self.manager._quorum_id,
                    "loss": loss.item(),
                }
                number += 1
                if step > before and step % told["evaluate_every"] == 0:  # all replicas do, at the same steps
                    begin = time.perf_counter()
                    with torch.no_grad():
                        tried["heldout"] = loss_of(self.model, heldout).item()
                    tried["evaluated_s"] = time.perf_counter() - begin
                log.write(json.dumps(tried) + "\n")
        self.manager.shutdown()

    def leave(self, *_signal: Any) -> None:
        """End after the step under way."""
        self.leaves = True


def main() -> None:
    """Train until told to end."""
    logging.getLogger().setLevel(logging.ERROR)
    replica = Replica(json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, replica.leave)
    replica.train()


if __name__ == "__main__":
    main()
