"""Label the row groups (Parquet's unit of rows) of a dataset: compute a model's log-probabilities for their tokens. Row groups
are independent. So labelling may be killed at any moment and resumed by any number of processes, and the resulting bytes are
the same.

    tokens of a row group -> model, some rows at a time -> log-probabilities -> file of labels, then a record of its digest
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from springtide.checkpoint.load import load
from springtide.config.engine import ModelConfig, ParallelConfig
from springtide.distributed.fsdp import in_precision
from springtide.errors import ConfigError, explain
from springtide.model import whole
from springtide.shards import LabelLayout, Manifest, SplitReader, ids_of, label_file, load_manifest
from springtide.storage import Folder, digest

_LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}
"""Device type -> number of logits computed at a time. At least one whole row is computed, even if it has more."""


@dataclasses.dataclass(frozen=True)
class LabelModel:
    """The checkpoint of the model that computes the labels, and the arguments to build the model. Picklable."""

    run: str
    """URL of the folder of the model's run."""
    checkpoint: str
    model: ModelConfig
    parallel: ParallelConfig
    """The ``parallel`` settings of the model's training: labels are computed in the same precision."""
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    whole_documents: bool


@dataclasses.dataclass(frozen=True)
class LabelJob:
    """The job to label one row group. Picklable."""

    dataset: str
    split: str
    shard: str
    group: int
    """Index of the row group in its shard (a file of rows)."""
    first_row: int
    """Index of the group's first row in the dataset's split."""
    rows: int
    by: LabelModel
    layout: LabelLayout
    out: Folder
    work: Folder
    """Folder for the records of finished row groups, needed until the labels of all groups are complete."""

    @property
    def name(self) -> str:
        """Name of the file of labels that the job writes."""
        return label_file(self.shard, self.group)

    @property
    def record(self) -> str:
        return f"groups/{self.name}.json"

    def done(self) -> bool:
        """Return True if the group is already labelled."""
        return self.work.exists(self.record)


def label_group(job: LabelJob) -> None:
    """Label a row group and write its file and its record, unless the record exists."""
    if job.done():
        return
    found = _reader(job.dataset, job.split).read(np.arange(job.first_row, job.first_row + job.rows))
    model, threads = _loaded(job.by), torch.get_num_threads()
    columns = {name: np.empty(shape, kind) for name, (kind, shape) in job.layout.columns(job.rows).items()}
    torch.set_num_threads(1)  # so that sums always have the same bits; other processes use the other cores
    try:
        for part in _parts(model, found.tokens.shape):
            for name, values in columns_of(model, ids_of(found.tokens[part]), job.layout, job.by.vocab_size).items():
                columns[name][part] = values
    finally:
        torch.set_num_threads(threads)
    running, parts = digest.Running(), job.layout.encode(found.sample_ids, columns)
    for one in parts:
        running.add(one)
    job.out.put(job.name, parts)
    job.work.write_json(job.record, {"digest": running.end()})


@torch.inference_mode()
def columns_of(model: nn.Module, tokens: np.ndarray, layout: LabelLayout, vocab_size: int) -> dict[str, np.ndarray]:
    """Return the labels that ``model`` computes for rows, by column name.

    Args:
        model: maps ids (B, L) to logits (B, L, V).
        tokens: ids of the rows, (B, L + 1).
        layout: the columns to compute.
        vocab_size: number of ids in the vocabulary. The model may compute logits for more; ``topk`` labels leave these out.
    """
    device = next(model.parameters()).device
    rows_BL = torch.from_numpy(tokens.astype(np.int64)).to(device)
    log_BLV: Tensor = model(rows_BL[:, :-1]).float().log_softmax(-1)
    if layout.what == "logprob":
        return {"logprobs": log_BLV.gather(-1, rows_BL[:, 1:, None])[..., 0].cpu().numpy()}
    logprobs_BLK, ids_BLK = most_likely(log_BLV, layout.k, vocab_size)
    least = torch.finfo(torch.float16).min  # stands for -inf, the log-probability of an impossible id
    return {
        "logprobs": logprobs_BLK.clamp_min(least).half().cpu().numpy(),
        "ids": ids_BLK.cpu().numpy().astype(layout.id_type),
    }


def most_likely(log_BLV: Tensor, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the ``k`` most likely ids below ``vocab_size``, and these ids, int64, (B, L, k) each. If
    ``k`` is ``vocab_size``, ids are in ascending order instead of by probability.

    Examples:
        >>> logprobs, ids = most_likely(torch.tensor([[[0.1, 0.6, 0.3]]]).log(), 2, 3)
        >>> ids.tolist(), [f"{one:.1f}" for one in logprobs.exp().flatten()]
        ([[[1, 2]]], ['0.6', '0.3'])
    """
    log_BLV = log_BLV[..., :vocab_size]
    if k == vocab_size:
        return log_BLV, torch.arange(k, device=log_BLV.device).expand(log_BLV.shape)  # a view, which takes no memory
    best = log_BLV.topk(k, dim=-1)
    return best.values, best.indices


def check_reads(field: str, by: str, model: ModelConfig, tokenizer: str, manifest: Manifest) -> None:
    """Check that the model ``by``, which the setting ``field`` names, can read the rows of a dataset. ``tokenizer``: digest of
    the model's tokenizer; empty if unknown. Raises ConfigError if it cannot."""
    if tokenizer not in ("", manifest.tokenizer_digest):
        problem = f"has the tokenizer {tokenizer}, the dataset has {manifest.tokenizer_digest}: their ids differ"
        remedy = "prepare the text with corpus.tokenizer = the model's tokenizer.json"
        raise ConfigError(explain(field, by, problem, remedy))
    if model.vocab_size and model.vocab_size < manifest.vocab_size:
        problem = f"has {model.vocab_size} ids, the dataset {manifest.vocab_size}: another vocabulary"
        raise ConfigError(explain(field, by, problem, "name a model of the dataset's vocabulary"))
    if model.max_sequence_length < manifest.sequence_length:
        problem = f"reads at most {model.max_sequence_length} tokens, a row has {manifest.sequence_length}"
        remedy = "name a model of a longer context, or prepare shorter rows (shards.sequence_length)"
        raise ConfigError(explain(field, by, problem, remedy))


def _parts(model: nn.Module, shape: tuple[int, ...]) -> Iterator[slice]:
    """Return slices of the rows of a row group whose tokens have ``shape`` (rows, L + 1). Each slice needs at most
    ``_LOGITS_AT_ONCE`` logits, or is a single row."""
    rows, length = shape
    logits = (length - 1) * getattr(model, "padded_vocab_size", 2**16)
    at_once = max(1, _LOGITS_AT_ONCE[next(model.parameters()).device.type] // logits)
    return (slice(begin, begin + at_once) for begin in range(0, rows, at_once))


@functools.lru_cache(maxsize=1)
def _reader(dataset: str, split: str) -> SplitReader:
    folder = Folder(dataset)
    return SplitReader(folder, load_manifest(folder), split)


@functools.lru_cache(maxsize=1)
def _loaded(by: LabelModel) -> nn.Module:
    """Return the model that computes labels, loaded once per process, on the process's GPU if it has one."""
    model = whole(by.model, by.vocab_size, by.eos_id, by.bos_id, by.whole_documents)
    load(Folder(by.run), by.checkpoint, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return in_precision(model, by.parallel).to(device).eval()


def release() -> None:
    """Free the labelling model that this process has loaded."""
    _loaded.cache_clear()
