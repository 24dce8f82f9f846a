"""The one table of metric names, their units and what they mean. MLflow, the report and the tests read it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A row of the table."""

    unit: str
    meaning: str


STEP_METRICS: dict[str, Metric] = {
    "loss": Metric("nats/token", "training loss over the valid tokens of the step, all workers"),
    "grad_norm": Metric("1", "global gradient norm before clipping"),
    "learning_rate": Metric("1", "learning rate the step was taken with"),
    "tokens": Metric("tokens", "tokens trained on since the run began"),
    "tokens_per_s": Metric("tokens/s", "step tokens over step time, all workers"),
    "step_time_s": Metric("s", "from one optimizer step to the next, the wait for data included"),
    "data_wait_s": Metric("s", "part of the step spent waiting for the feed, on the rank that waited longest"),
    "mfu": Metric("ratio", "model FLOPs over the peak of all workers' devices; above 1 that peak is unknown"),
    "memory_bytes": Metric("bytes", "peak memory of rank 0: device memory on a GPU, resident set on a CPU"),
    "world_size": Metric("workers", "workers in the step"),
    "loss_scale": Metric("1", "what the loss was multiplied by before backward"),
}

EVAL_METRICS: dict[str, Metric] = {
    "heldout_loss": Metric("nats/token", "loss on held-out rows"),
    "heldout_bits_per_byte": Metric("bits/byte", "held-out loss over the bytes of the text its tokens stand for"),
}


def utilisation(mfu: float) -> str:
    """MFU for people. No device does more than its peak: above 1, it is the peak that was not known."""
    return f"{mfu:.0%}" if mfu <= 1.0 else "unknown (peak not known)"
