"""A small dataset, a teacher of it, and what the teacher says about its rows by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from loops import train
from prepared import prepare
from ranks import run_ranks

from springtide import config as configs
from springtide.checkpoint.format import committed
from springtide.checkpoint.load import load
from springtide.config import Config
from springtide.model import build
from springtide.run.folder import Run
from springtide.shards import SplitReader, ids_of, load_manifest
from springtide.storage import Folder


def few_rows(tiny: Config, **changes: Any) -> Config:
    """A config with some hundred rows in few row groups, whose documents are masked from each other."""
    packed = {"shards.dataset": "", "corpus.max_files": 3, "shards.packing": "best_fit", "stream.max_epochs": 100}
    packed |= {"shards.mask_across_documents": True, "shards.rows_per_group": 24, "shards.groups_per_shard": 2}
    return prepare(tiny.override({**packed, **{key.replace("__", "."): value for key, value in changes.items()}}))


def teacher(root: Path, datasets: Path) -> Config:
    """A dataset of few rows, and a run on it, ``teacher``, of three steps."""
    tiny = configs.recipes.tiny().override({"shards.root": str(datasets), "run.root": str(root / "runs")})
    config = few_rows(tiny.override({"track.mlflow_uri": "off", "track.progress": False}))
    short = {"run.id": "teacher", "train.total": 3 * config.tokens_per_step, "optim.warmup": 0, "train.eval_tokens": 0}
    config = config.override({**short, "optim.peak_lr": 2e-2})
    run_ranks(1, train, config.override({"checkpoint.stage": ""}))
    Run(Folder(config.run.root) / "teacher").write_config(config)
    return config


def plain_log_probabilities(
    config: Config, run: str, split: str, checkpoint: str = ""
) -> tuple[np.ndarray, torch.Tensor]:
    """The ids of all rows, (T, L + 1), and the log-probabilities of a checkpoint of ``run``, (T, L, V)."""
    dataset, folder = Folder(config.shards.dataset), Folder(run)
    manifest = load_manifest(dataset)
    model = build(config.model, manifest.vocab_size, *manifest.document_ids)
    load(folder, checkpoint or committed(folder)[-1], model)
    ids = ids_of(SplitReader(dataset, manifest, split).read(np.arange(manifest.splits[split].rows)).tokens)
    inputs = torch.from_numpy(ids[:, :-1].astype(np.int64))
    torch.set_num_threads(1)
    rows = manifest.splits[split].group_rows().tolist()
    with torch.no_grad():  # a row group at a time: the bits of a product may depend on its shape
        return ids, torch.cat([model(part).log_softmax(-1) for part in inputs.split(rows)])
