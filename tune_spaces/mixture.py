"""How much of each corpus: weights in a mixture of two, for a recipe with

    --stream.mixture '{"code": "<dataset>", "prose": "<dataset>"}'

A weight that is not in the space is 1, and shares are weights divided by their sum: one of the two is enough.
The objective is the mean over the held-out sets: the other figures weigh them as the mixture does, which differs from trial to
trial, and would favour the text that is easiest to predict.
"""

SPACE = {
    "stream.weights.code": ("log_uniform", 0.1, 10.0),
}
OBJECTIVE = {"metric": "heldout_bits_per_byte_mean", "mode": "min"}
BUDGET = {"trials": 8, "tokens_per_trial": 500_000, "rungs": 4, "finalists": 2, "seeds": 3}
