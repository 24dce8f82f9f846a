"""Learning rate and weight decay of a recipe.

SPACE: dotted field -> (kind, low, high) or ("choice", ...); OBJECTIVE: metric to compare, and min or max; BUDGET: what a sweep
may spend; WHERE (optional): a function of a point, True for points to try.
"""

SPACE = {
    "optim.peak_lr": ("log_uniform", 3e-4, 1e-2),
    "optim.weight_decay": ("log_uniform", 1e-3, 0.5),
}
OBJECTIVE = {"metric": "heldout_bits_per_byte", "mode": "min"}
BUDGET = {"trials": 16, "tokens_per_trial": 500_000, "rungs": 4}
