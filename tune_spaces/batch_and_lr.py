"""Batch size and learning rate together: a larger batch allows a higher rate, up to a point."""

SPACE = {
    "stream.global_batch": ("choice", 8, 16, 32, 64),
    "optim.peak_lr": ("log_uniform", 3e-4, 1e-2),
}
OBJECTIVE = {"metric": "heldout_bits_per_byte", "mode": "min"}
BUDGET = {"trials": 16, "tokens_per_trial": 500_000, "rungs": 4}
