"""Small corpora, and configs whose dataset is made in this process."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.dataset import Map, in_process, make_dataset, silent
from springtide.shards import load_manifest
from springtide.storage import Folder

LENGTH = 16

SEALED: dict[str, Any] = {
    "end_of_text": 0,
    "begin_of_text": 0,
    "tokenizer_digest": "0" * 32,
    "fingerprint": "",
    "heldout_fraction": 0.02,
    "source": {},
}
"""What a manifest says of its tokenizer and source, of a dataset that a test seals by hand."""


def prepare(config: Config, run: Map = in_process) -> Config:
    """Return ``config`` with its dataset, found or made."""
    return config.override({"shards.dataset": make_dataset(config.corpus, config.shards, silent, run)})


def short_run(root: Path, steps: int, **changes: Any) -> Config:
    """Return a config of ``steps`` steps of the tiny recipe below ``root``: no evaluations, one checkpoint."""
    settings = {
        "run.root": f"{root}/runs",
        "shards.root": f"{root}/datasets",
        "corpus.max_files": 20,
        "train.total": steps * 12 * 64,
        "train.eval_tokens": 0,
        "train.micro_batch": 2,
        "checkpoint.every_steps": 0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return prepare(configs.recipes.tiny().override(settings))


def format_8(dataset: str) -> dict[str, Any]:
    """The manifest of a dataset as the format before the index of row groups had it, with its digest."""
    manifest = load_manifest(Folder(dataset)).model_copy(update={"format": 8, "row_groups": None})
    return {**manifest.in_full(), "digest": manifest.digest}


def write_corpus(folder: Path, documents: int = 240, seed: int = 0) -> list[str]:
    """Files of random words, some exact and some near copies of others."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=rng.randint(40, 200))) for _ in range(documents)]
    texts += texts[:10]  # exact copies
    texts += [text + " and one word more" for text in texts[10:20]]  # near copies
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text)
    return texts


def small(root: Path, source: Path, **changes: Any) -> Config:
    """Return a config for small rows and shards."""
    settings = {
        "corpus.source": str(source),
        "shards.root": str(root),
        "shards.sequence_length": LENGTH,
        "shards.rows_per_group": 32,
        "shards.groups_per_shard": 8,
        "shards.heldout_fraction": 0.1,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return configs.recipes.tiny().override({**settings, "corpus.max_files": 0})


def contents(folder: str) -> dict[str, str]:
    """Digest of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
