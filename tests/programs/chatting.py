"""A run on chats whose only checkpoint has random weights, and task files for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from prepared import prepare, small
from saving import meta

from springtide import config as configs
from springtide.checkpoint.tensors import named_tensors, raw
from springtide.checkpoint.weights_only import write_weights
from springtide.dataset import open_dataset
from springtide.model import whole
from springtide.run.folder import Run, open_run
from springtide.storage import Folder

LENGTH = 160
MODEL = {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96, "max_sequence_length": LENGTH}
WORDS = ("red", "green", "blue", "tide", "moon", "sand")


def chat_run(root: Path, step: int = 7, **changes: Any) -> Run:
    """Return a run below ``root``; ``changes``: of its config, dots as two underscores."""
    source = root / "chats.jsonl"
    chats = [
        [{"role": "user", "content": f"Add {number} to 2."}, {"role": "assistant", "content": f"It is {number + 2}."}]
        for number in range(120)
    ]
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = {"corpus__chat_template": "chatml", "corpus__tokenizer": "bytes", "corpus__begin_of_text": "<s>"}
    given |= {"shards__sequence_length": LENGTH, "shards__packing": "best_fit"}
    given |= {"shards__mask_across_documents": True, "run__id": "chats", "run__root": str(root / "runs")}
    given |= {f"model__{name}": value for name, value in MODEL.items()} | {"track__mlflow_uri": "off", **changes}
    config = prepare(small(root / "made", source, **given))
    manifest, _ = open_dataset(config.shards.dataset)
    model = whole(config.model, manifest.vocab_size, *manifest.document_ids)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.embedding.weight[manifest.vocab_size :] = 0.0  # rows that no id has; the head is the same tensor
        model.head.weight[manifest.vocab_size :] = 0.0
    run, tensors = Folder(config.run.root) / config.run.id, named_tensors(model)
    known = meta(step).model_copy(update={"tokenizer_digest": manifest.tokenizer_digest})
    kinds = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_weights(run, known, config.model_dump(mode="json"), kinds, lambda one: raw(tensors[one.tensor]), 2**40)
    run.write(configs.RUN_CONFIG, configs.dump(config))
    return open_run(run.url)


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **settings: Any) -> None:
    """Write a task of lm-evaluation-harness and its data."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    task |= {"test_split": "test", "doc_to_text": "{{question}}", "metadata": {"version": 1.0}, **settings}
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML


def choices(number: int = 24) -> list[dict[str, Any]]:
    """Return documents of a task of multiple choice."""
    return [
        {
            "question": f"What is {WORDS[one % 6]} number {one}?",
            "choices": [f"{WORDS[(one + other) % 6]} {other * 7}" for other in range(3)],
            "answer": one % 3,
        }
        for one in range(number)
    ]


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ANSWER = {
    "output_type": "generate_until",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
