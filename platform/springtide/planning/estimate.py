"""Estimate the device memory that a step needs, settings that lower it, and how evenly a step's work is dealt to workers."""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.config.code import BESIDE_THE_MODEL
from springtide.elastic.group_sizes import LaneEvenness, lane_evenness, more_even
from springtide.errors import ConfigError, explain
from springtide.planning.device_memory import USABLE_SHARE

_REMEDIES: dict[str, dict[str, Any]] = {
    "parallel.recompute = full": {"parallel.recompute": "full"},
    "train.micro_batch = 1": {"train.micro_batch": 1},
    "parallel.strategy = zero3 over all": {"parallel.strategy": "zero3", "parallel.shard_workers": 0},
    "parallel.offload = parameters": {"parallel.offload": "parameters"},
    "parallel.precision = bf16": {"parallel.precision": "bf16", "parallel.reduction": "fp32"},
}
_TOGETHER = "all of these"
_MORE_WORKERS = (2, 4, 8)
_PROBED = (2, 4)
"""Micro-batch sizes at which memory is predicted; other sizes are extrapolated from these two [rows]."""
_BETTER = 0.005
"""Another number of rows per step is reported if it raises the mean share of a step in which workers compute by this much."""
_PLENTY = 8
"""If a device has this many times the bytes of ``_bound`` (an upper bound), a step fits, and the slow prediction is skipped."""


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Predicted device memory of a step on each worker, as configured and after changes that may lower it."""

    workers: int
    """Number of workers of the configured run."""
    configured_bytes: int
    """Memory of a step without a change [bytes per worker]."""
    changed_bytes: dict[str, int]
    """Change of a setting or of the number of workers, as text -> memory with this change [bytes per worker]."""

    def as_dict(self) -> dict[str, int]:
        """Return change, as text -> memory [bytes per worker], for ``springtide plan --json``. The first entry is ``as
        configured``."""
        return {"as configured": self.configured_bytes, **self.changed_bytes}


def num_ids(config: Config, given: int = 0) -> int:
    """Return the vocabulary size of a run without a dataset: ``given``, else ``model.vocab_size`` (set for weights that the run
    starts from), else ``corpus.vocab_size`` (for a tokenizer that is trained later). A number of 0 counts as not given."""
    return given or config.model.vocab_size or config.corpus.vocab_size


def estimate_memory(config: Config, vocab_size: int, eos_id: int | None, workers: int) -> MemoryEstimate:
    """Predict the device memory of a step, as configured and after each change that may lower it. Nothing is trained: the step
    runs on fake tensors, which have shapes but no memory.

    Args:
        config: settings of the run.
        vocab_size: number of token ids.
        eos_id: end-of-document id if tokens attend only to their own document, else None.
        workers: number of workers.

    Returns:
        The peak of a step's tensors; what libraries hold for themselves, some hundred MB, is not included.

    Raises:
        ConfigError: ``workers`` or ``vocab_size`` is less than 1.
        ValueError: ``train.micro_batch`` is ``auto``.

    Examples:
        >>> from springtide.planning.estimate import estimate_memory
        >>> config = st.recipes.tiny().override({"model.num_layers": 1})
        >>> found = estimate_memory(config, vocab_size=257, eos_id=None, workers=6)
        >>> found.changed_bytes["train.micro_batch = 1"] < found.configured_bytes
        True
    """
    from springtide.planning.step_memory import predicted_bytes

    for name, value in (("vocabulary", vocab_size), ("workers", workers)):
        if value < 1:
            raise ConfigError(explain(name, value, "must be at least 1", "give a positive number"))
    before = configs.flatten(config)
    remedies = {
        words: changes
        for words, changes in _REMEDIES.items()
        if any(before[name] != value for name, value in changes.items())
        and (config.elastic.gpus_per_worker or "parallel.offload" not in changes)
    }
    if len(remedies) > 1:
        remedies[_TOGETHER] = {name: value for changes in remedies.values() for name, value in changes.items()}
    found = {
        words: predicted_bytes(config.override(changes), vocab_size, eos_id, workers)
        for words, changes in remedies.items()
    }
    for times in _MORE_WORKERS:
        if workers * times <= config.stream.num_lanes and not config.parallel.shard_workers:
            found[f"{workers * times} workers"] = predicted_bytes(config, vocab_size, eos_id, workers * times)
    return MemoryEstimate(workers, predicted_bytes(config, vocab_size, eos_id, workers), found)


@dataclasses.dataclass(frozen=True)
class EvennessEstimate:
    """How evenly lanes (fixed shares of a batch, never divided) are dealt to each allowed number of workers. A worker with
    fewer lanes waits for the workers with more."""

    least_workers: int
    most_workers: int
    rows: int
    """Number of rows in a step, ``stream.global_batch``."""
    evenness: LaneEvenness
    better_rows: int
    """Number of rows near ``rows`` whose lanes are dealt more evenly; ``rows`` if no number is better."""
    better_mean: float

    def as_dict(self) -> dict[str, float]:
        """Return the estimate of evenness as plain data, as ``springtide plan --json`` prints it."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if name != "evenness"}
        return {**found, **self.evenness._asdict()}

    def describe(self) -> str:
        """Return the estimate of evenness as one line of text."""
        found, sizes = self.evenness, f"{self.least_workers} to {self.most_workers} workers"
        text = f"{self.rows} rows in {found.lanes} lanes keep workers busy for {found.mean:.1%} of a step over {sizes}"
        if found.worst < found.mean:
            text += f", {found.worst:.1%} at {found.worst_workers}"
        better = f"; more even: {self.better_rows} rows, {self.better_mean:.1%}"
        return text + better * (self.better_rows != self.rows)


def estimate_evenness(config: Config) -> EvennessEstimate:
    """Return how evenly a step's lanes (fixed shares of its batch) are dealt to each number of workers that ``config`` allows.

    Args:
        config: settings of the run.

    Returns:
        The mean and the worst evenness (share of a step in which a worker computes), and a batch size near the configured size
        with a better evenness, if there is one.

    Examples:
        >>> from springtide.planning.estimate import estimate_evenness
        >>> config = st.Config().override({"stream.global_batch": 100, "elastic.min_workers": 8, "elastic.max_workers": 12})
        >>> found = estimate_evenness(config)
        >>> f"{found.evenness.mean:.3f} with {found.rows} rows, {found.better_mean:.3f} with {found.better_rows}"
        '0.944 with 100 rows, 0.986 with 108'
    """
    elastic, lanes = config.elastic, config.stream.num_lanes
    cell = max(1, config.parallel.shards)
    sizes = [*range(-(-elastic.min_workers // cell) * cell, elastic.max_workers + 1, cell)] or [elastic.max_workers]
    found, better = lane_evenness(lanes, sizes), more_even(lanes, sizes)
    if better.mean < found.mean + _BETTER:
        better = found
    rows = better.lanes * (config.stream.global_batch // lanes)
    return EvennessEstimate(sizes[0], sizes[-1], config.stream.global_batch, found, rows, better.mean)


def choose_micro_batch(config: Config, vocab_size: int, eos_id: int | None, device_bytes: int) -> Config:
    """Return ``config`` with a number of rows in place of ``train.micro_batch: auto``; without ``auto``, return it unchanged.
    The number is the largest power of two at which a step is predicted to leave a tenth of the device's memory free, both with
    the fewest and with the most workers. Raises ConfigError for ``auto`` if ``device_bytes`` is 0 (unknown)."""
    from springtide.planning.step_memory import predicted_bytes

    if config.train.micro_batch != "auto":
        return config
    if not device_bytes:
        raise ConfigError(
            explain("train.micro_batch", "auto", "the memory of the devices is not known", "give a number of rows")
        )
    fitting = []
    for workers in {config.elastic.min_workers, config.elastic.max_workers}:
        fewer, more = (
            predicted_bytes(config.override({"train.micro_batch": size}), vocab_size, eos_id, workers)
            for size in _PROBED
        )
        a_row = max(1.0, (more - fewer) / (_PROBED[1] - _PROBED[0]))  # each row adds the same memory
        fitting.append(_PROBED[0] + (USABLE_SHARE * device_bytes - fewer) / a_row)
    most = min(*fitting, -(-config.stream.global_batch // config.elastic.min_workers))
    return config.override({"train.micro_batch": 2 ** int(math.log2(max(1.0, most)))})


def least_workers(config: Config, vocab_size: int, eos_id: int | None, device_bytes: int) -> int:
    """Return the smallest allowed number of workers at which a step with micro-batches of one row is predicted to fit in each
    device. If no number fits, return the largest allowed number. If ``device_bytes`` is 0 (unknown), return the smallest
    allowed number."""
    from springtide.planning.step_memory import predicted_bytes

    elastic, cell, one_row = config.elastic, max(1, config.parallel.shards), config.override({"train.micro_batch": 1})
    if (
        not device_bytes
        or elastic.min_workers == elastic.max_workers
        or _fits_easily(one_row, vocab_size, device_bytes)
    ):
        return elastic.min_workers
    sizes = range(-(-elastic.min_workers // cell) * cell, elastic.max_workers + 1, cell)
    fitting = bisect.bisect_left(
        sizes, True, key=lambda workers: predicted_bytes(one_row, vocab_size, eos_id, workers) <= device_bytes
    )
    return sizes[fitting] if fitting < len(sizes) else elastic.max_workers


def check_fits(config: Config, vocab_size: int, eos_id: int | None, workers: int, device_bytes: int) -> None:
    """Raise ConfigError, with remedies, if a step on ``workers`` workers is predicted to need more than ``device_bytes`` of
    memory on each. If ``device_bytes`` is 0 (unknown), nothing is checked."""
    from springtide.planning.step_memory import predicted_bytes

    if not device_bytes or _fits_easily(config, vocab_size, device_bytes):
        return
    needed = predicted_bytes(config, vocab_size, eos_id, workers)
    if needed <= device_bytes:
        return
    found = estimate_memory(config, vocab_size, eos_id, workers).as_dict()
    helps = [f"{words} ({gigabytes(size)})" for words, size in found.items() if size <= device_bytes]
    least = min(found, key=lambda words: found[words])
    nearly = f"nothing alone: {least} still needs {gigabytes(found[least])}; take a smaller model or larger devices"
    raise ConfigError(
        explain(
            "model",
            f"{config.model.num_layers} layers of {config.model.dim}",
            f"needs {gigabytes(needed)} on each of {workers} workers, {gigabytes(needed - device_bytes)} more than the "
            f"{gigabytes(device_bytes)} that each has",
            f"what would fit: {' or '.join(helps) or nearly}",
        )
    )


def _fits_easily(config: Config, vocab_size: int, device_bytes: int) -> bool:
    full_logits = config.sources.keys() - BESIDE_THE_MODEL or config.objective.source
    return not full_logits and _bound(config, vocab_size) * _PLENTY < device_bytes


def _bound(config: Config, vocab_size: int) -> int:
    """Return an upper bound of a step's memory with any sharding and precision: 32 bytes per weight, and every activation in
    fp32 [bytes]."""
    model, length = config.model, config.shards.sequence_length
    rows = min(config.train.rows_at_once, config.stream.global_batch)
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_width
    block = model.dim * (heads + model.num_heads * model.head_width + 3 * model.ffn_dim)
    activations = 20 * model.dim + 10 * model.ffn_dim + 6 * heads + 2 * length
    if model.attention_cap:
        activations += 6 * model.num_heads * length
    weights = model.num_layers * block + 2 * max(vocab_size, model.vocab_size) * model.dim
    return 32 * weights + 4 * rows * length * model.num_layers * activations + 2**28


def gigabytes(size: int) -> str:
    """Return ``size`` [bytes] as text in GB."""
    return f"{size / 1e9:.3g} GB"
