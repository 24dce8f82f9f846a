"""The table of metrics: names, units, meanings, and names in MLflow. MLflow, the report and the tests read it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """Unit, meaning and MLflow name of one metric."""

    unit: str
    meaning: str
    tracked: str
    """Name in MLflow. MLflow's pages group metrics by the part of the name before ``/``."""


STEP_METRICS: dict[str, Metric] = {
    "loss": Metric("nats/token", "training loss over the valid tokens of the step, all workers", "train/loss"),
    "grad_norm": Metric("1", "global gradient norm before clipping", "train/grad_norm"),
    "learning_rate": Metric("1", "learning rate of the step", "train/learning_rate"),
    "tokens": Metric("tokens", "tokens trained on since the run began", "train/tokens"),
    "tokens_per_s": Metric("tokens/s", "step tokens over step time, all workers", "throughput/tokens_per_s"),
    "step_time_s": Metric(
        "s", "time from one optimizer step to the next, including the wait for data", "throughput/step_time_s"
    ),
    "data_wait_s": Metric(
        "s", "part of the step spent waiting for the feed, on the rank that waits longest", "throughput/data_wait_s"
    ),
    "mfu": Metric(
        "ratio", "model FLOPs over the peak of all workers' devices; above 1 if that peak is unknown", "throughput/mfu"
    ),
    "memory_bytes": Metric(
        "bytes", "peak memory of rank 0: device memory on a GPU, resident set on a CPU", "throughput/memory_bytes"
    ),
    "world_size": Metric("workers", "workers in the step", "elastic/world_size"),
    "energy_j": Metric("J", "energy of all workers since the step before (docs/how-to/cost.md)", "energy/joules"),
    "energy_between_j": Metric(
        "J", "part of it used between the steps: evaluations, saves, waits for data", "energy/joules_between"
    ),
    "loss_scale": Metric("1", "factor that the loss is multiplied by before backward", "train/loss_scale"),
}

EXTRA_METRICS: dict[str, Metric] = {
    "largest_logit": Metric(
        "1", "largest logit of the tokens that count in the loss, with train.metrics", "train/largest_logit"
    ),
    "noise_scale": Metric(
        "tokens",
        "gradient noise scale, averaged over about the last 30 steps, with train.metrics; not told where one "
        "worker computes a step in one piece",
        "train/noise_scale",
    ),
    "anchor_penalty": Metric(
        "nats/token", "penalty for the distance from the first weights, with objective.anchor", "train/anchor_penalty"
    ),
    "objective/NAME": Metric("1", "part NAME of the objective, over its weight", "train/objective/NAME"),
    "loss/NAME": Metric(
        "nats/token", "training loss over the valid tokens of source NAME in the step", "train/loss/NAME"
    ),
    "step_tokens/NAME": Metric("tokens", "valid tokens of source NAME in the step", "train/step_tokens/NAME"),
    "epochs/NAME": Metric("epochs", "how many times the run has read source NAME", "train/epochs/NAME"),
}
"""Metrics in ``StepDone.extra``. ``objective/NAME`` is a named part of the loss function. In all other metrics, ``NAME`` is a
source (named part of a dataset). Metrics of sources are reported only if the run trains on 2 to 32 sources."""

EVAL_METRICS: dict[str, Metric] = {
    "heldout_loss": Metric("nats/token", "loss on held-out rows", "heldout/loss"),
    "ema_heldout_loss": Metric(
        "nats/token", "loss of the averaged weights on held-out rows, with optim.ema_half_life", "heldout/ema_loss"
    ),
    "heldout_bits_per_byte": Metric(
        "bits/byte", "held-out loss per byte of the text that its tokens stand for", "heldout/bits_per_byte"
    ),
}

SOURCE_EVAL_METRICS: dict[str, Metric] = {
    "heldout_loss/NAME": Metric("nats/token", "loss on held-out rows of source NAME", "heldout/loss/NAME"),
    "heldout_bits_per_byte/NAME": Metric(
        "bits/byte", "the same per byte of the text that its tokens stand for", "heldout/bits_per_byte/NAME"
    ),
    "forgetting/NAME": Metric(
        "nats/token", "how much worse the loss on source NAME is than before", "heldout/forgetting/NAME"
    ),
}
"""Metrics of each source (named part of a dataset) in an ``Evaluated`` event."""
_ALL = STEP_METRICS | EXTRA_METRICS | EVAL_METRICS | SOURCE_EVAL_METRICS
_OF_SOURCES = "/NAME"


def tracked_name(name: str) -> str:
    """Return the MLflow name of a metric. A metric that is not in this module's tables keeps its name, such as a task's score.

    >>> tracked_name("heldout_loss"), tracked_name("loss/wiki"), tracked_name("task/f1")
    ('heldout/loss', 'train/loss/wiki', 'task/f1')
    """
    if found := _ALL.get(name):
        return found.tracked
    family, _, source = name.partition("/")
    found = _ALL.get(f"{family}{_OF_SOURCES}")
    return f"{found.tracked.removesuffix(_OF_SOURCES)}/{source}" if found and source else name


def grouped_name(name: str) -> str:
    """Return the MLflow name of a metric in a run that an older version began. That version did not rename metrics of sources
    (names with ``/``), and put energy under ``energy/``.

    >>> grouped_name("heldout_loss"), grouped_name("loss/wiki"), grouped_name("energy_j")
    ('heldout/loss', 'loss/wiki', 'energy/energy_j')
    """
    if "/" in name:
        return name
    return f"energy/{name}" if name.startswith("energy_") else tracked_name(name)


def utilisation(mfu: float) -> str:
    """Return MFU (model FLOPs utilization) as text. No device exceeds its peak, so an MFU above 1 means that the peak is not
    known: the text is then "unknown"."""
    return f"{mfu:.0%}" if mfu <= 1.0 else "unknown (peak not known)"
