"""The config's leaf fields by dotted name, as the command line and saved files spell them."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel

from springtide.config.schema import Config

USUAL = (
    *("run.id", "run.root"),
    *("corpus.source", "corpus.field", "corpus.chat_template", "corpus.tokenizer"),
    *("shards.dataset", "shards.sequence_length"),
    *("stream.global_batch", "stream.seed"),
    *("model.num_layers", "model.dim", "model.num_heads"),
    *("parallel.strategy", "parallel.precision", "parallel.compile"),
    *("optim.optimizer", "optim.peak_lr", "optim.schedule", "optim.warmup"),
    *("train.total", "train.micro_batch", "train.eval_every", "train.start_from"),
    *("checkpoint.every_steps", "checkpoint.keep_last"),
    *("elastic.min_workers", "elastic.max_workers", "elastic.gpus_per_worker"),
    "track.mlflow_uri",
)
"""The thirty settings that people change most: those that ``--help`` shows and ``springtide init`` writes."""


def fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> pydantic field, for every leaf of ``section``."""
    leaves: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            leaves |= fields(field.annotation, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = field
    return leaves


@functools.cache
def is_free(name: str) -> bool:
    """Return whether the field with this dotted name may change when a run is resumed."""
    return bool(mark(fields()[name]))


def mark(field: Any) -> str:
    """Return "free" if a field may change when a run is resumed, "ahead" if only for steps that are not trained yet, else
    ""."""
    extra = field.json_schema_extra or {}
    return "ahead" if extra.get("ahead") else "free" if extra.get("free") else ""
