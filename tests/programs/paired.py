"""A small dataset of pairs of answers, a run on it, ``reference``, and its log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

from loops import train
from prepared import prepare, small
from ranks import run_ranks

from springtide.api.label import label
from springtide.config import Config
from springtide.run.folder import Run
from springtide.storage import Folder

STEPS = 4


def paired(root: Path, steps: int = STEPS) -> Config:
    """Return the config of a DPO run of ``steps`` steps that starts from ``reference``, all below ``root``."""
    pairs = [{"prompt": f"Is {n} odd?", "chosen": "yes" * (n % 5 + 1), "rejected": f"no{n}"} for n in range(90)]
    (root / "pairs.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in pairs))
    packed = {"shards__packing": "best_fit", "shards__mask_across_documents": True, "shards__sequence_length": 300}
    config = small(
        root / "data", root / "pairs.jsonl", **packed, corpus__tokenizer="bytes", corpus__chat_template="chatml"
    )
    config = prepare(
        config.override({"stream.max_epochs": 100, "run.root": str(root / "runs"), "track.mlflow_uri": "off"})
    )
    step = config.tokens_per_step
    fixed = {"run.id": "reference", "train.total": 2 * step, "optim.warmup": 0, "train.eval_tokens": 0}
    fixed |= {"parallel.reduction": "fp64", "stream.lanes": 6, "train.micro_batch": 2, "track.progress": False}
    config = config.override(fixed)
    run_ranks(1, train, config.override({"checkpoint.stage": ""}))
    Run(Folder(config.run.root) / "reference").write_config(config)
    label(config.shards.dataset, f"{config.run.root}/reference", "logprob", str(root / "labels"))
    learns = {"objective.source": "dpo", "objective.labels": str(root / "labels"), "objective.beta": 0.5}
    start = {"train.start_from": f"{config.run.root}/reference/checkpoints/step-0000000002"}
    return config.override({**learns, **start, "train.start_with": "weights", "train.total": steps * step})
