"""Depth against width, for models of about the same size."""

SPACE = {
    "model.num_layers": ("uniform", 2, 12),
    "model.dim": ("choice", 128, 192, 256, 384, 512),
    "optim.peak_lr": ("log_uniform", 1e-3, 6e-3),
}
OBJECTIVE = {"metric": "heldout_bits_per_byte", "mode": "min"}
BUDGET = {"trials": 16, "tokens_per_trial": 500_000, "rungs": 4}


def WHERE(point):  # noqa: N802  the table's name for it
    """Return whether the blocks have between half and twice the weights of four layers of dim 256."""
    return 0.5 <= point["model.num_layers"] * point["model.dim"] ** 2 / (4 * 256**2) <= 2.0
