"""A run on three nodes, one of which begins to compute wrong results. Prints one line of JSON."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import springtide as st
from springtide import config as configs
from springtide.config.engine import ModelConfig
from springtide.events import Event, Failed, Miscomputed, Started, StepDone
from springtide.model import build as decoder

WRONG_NODE = "WRONG_NODE"
"""Environment variable with the path of a file that names the node."""
BEGINS, STEPS = 12, 40


def build(config: ModelConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> nn.Module:
    """The decoder, with a layer in which the device of that node flips a bit."""
    model = decoder(config.model_copy(update={"source": ""}), vocab_size, eos_id, bos_id)
    model.blocks[0].ffn.down.register_forward_hook(_flip)
    return model


def _flip(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    import ray

    file = Path(os.environ[WRONG_NODE])
    if module.training and file.exists() and file.read_text() == ray.get_runtime_context().get_node_id():
        output.data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 26)


def main() -> None:
    """Train, and say what became of the node."""
    from springtide.ray.cluster.local import LocalCluster

    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / "wrong-node"
        os.environ[WRONG_NODE] = str(file)
        changes = {
            "run.root": root,
            "run.id": "wrong",
            "shards.root": f"{root}/datasets",
            "model.source": "wrong_node:build",
            "train.total": STEPS * 12 * 64,
            "train.eval_tokens": 0,
            "optim.warmup": 0,
            "checkpoint.every_steps": 5,
            "parallel.reduction": "fp64",
            "elastic.max_workers": 3,
            "elastic.recheck": 0.001,
            "track.progress": False,
            "track.mlflow_uri": "off",
        }
        heard = list[Event]()
        with LocalCluster(3) as cluster:

            def listen(event: Event) -> None:
                heard.append(event)
                if isinstance(event, StepDone) and event.step == BEGINS and not file.exists():
                    beside = file.with_suffix(".new")
                    beside.write_text(cluster.nodes[1])
                    beside.rename(file)

            run = st.train(configs.recipes.tiny().override(changes), listen=listen)
            wrong = cluster.nodes[1]
        starts = [event for event in heard if isinstance(event, Started)]
        told = [event for event in heard if isinstance(event, Miscomputed)]
        found = {
            "ok": run.verify().ok and run.finished,
            "named": [event.nodes == [wrong] for event in told],
            "agreed_step": [event.agreed_step for event in told],
            "causes": [event.cause for event in heard if isinstance(event, Failed)],
            "world_sizes": [event.world_size for event in starts],
            "started_at": [event.step for event in starts],
            "left_out": [wrong not in event.nodes for event in starts],
            "abandoned": sorted({event.step for event in told}),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
