"""Learning rate over widths with ``base_width``: one rate should be near the best for all widths. The result has every point;
with 0 instead of 64 it shows how the best rate falls with the width in the standard parametrization."""

SPACE = {
    "model.base_width": ("choice", 64),
    "model.dim": ("choice", 64, 128, 256),
    "model.ffn_dim": ("choice", 172, 344, 688),
    "optim.peak_lr": ("log_uniform", 1e-3, 3e-2),
}
OBJECTIVE = {"metric": "heldout_bits_per_byte", "mode": "min"}
BUDGET = {"trials": 16, "tokens_per_trial": 500_000, "rungs": 4}


def WHERE(point):  # noqa: N802  the table's name for it
    """Return whether ffn_dim has the demo's proportion to dim: ``base_width`` assumes that all shapes grow together."""
    return point["model.ffn_dim"] * 256 == point["model.dim"] * 688
