"""Load the moving averages of weights from a checkpoint. Averages are optimizer state, sharded and stored like Adam's
moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from springtide.checkpoint.format import Piece
from springtide.checkpoint.tensors import local
from springtide.errors import CheckpointError

AVERAGE = "ema"
"""Key of a weight's moving average in the optimizer state, next to Adam's ``exp_avg``."""
_MODEL, _OPTIM, _END = "model/", "optim/", f"/{AVERAGE}"


class MissingAverage(CheckpointError):
    """The checkpoint is intact, but has no averaged weights."""


def as_weights(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces (stored tensor parts) of the averaged weights, under the names of the weights. For tensors without an
    average, such as frozen weights and buffers, return the pieces of the tensor itself. Raises MissingAverage if no weight has
    an average."""
    averages = [one._replace(tensor=_weight_of(one.tensor)) for one in pieces if _is_average(one.tensor)]
    if not averages:
        remedy = "optim.ema_half_life of its run is 0, or no weights were updated yet"
        raise MissingAverage(f"the checkpoint has no averaged weights: {remedy}")
    known = {one.tensor for one in averages}
    return [*averages, *(one for one in pieces if one.tensor.startswith(_MODEL) and one.tensor not in known)]


def match_averages(
    pieces: Sequence[Piece], wanted: Mapping[str, Tensor]
) -> tuple[list[Piece], dict[str, Tensor], dict[str, Tensor]]:
    """Return (pieces to read, tensors to fill from these pieces, averages to set to the loaded weights).

    ``pieces``: stored tensor parts. ``wanted``: tensors of this run, by name. If this run keeps moving averages and the
    checkpoint has none, the averages start as copies of the loaded weights. This may happen if the checkpoint is from another
    run. If only the checkpoint has averages, they are not read.
    """
    stored = {one.tensor for one in pieces if _is_average(one.tensor)}
    here = {name: tensor for name, tensor in wanted.items() if _is_average(name)}
    if stored and here:
        return list(pieces), dict(wanted), {}
    left = {name: tensor for name, tensor in wanted.items() if name not in here}
    return [one for one in pieces if one.tensor not in stored], left, here


@torch.no_grad()
def begin_averages(averages: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Start each moving average at the current value of its weight. ``averages``, ``tensors``: name -> tensor."""
    for name, average in averages.items():
        local(average).copy_(local(tensors[_weight_of(name)]))


def _is_average(name: str) -> bool:
    return name.startswith(_OPTIM) and name.endswith(_END)


def _weight_of(name: str) -> str:
    return _MODEL + name.removeprefix(_OPTIM).removesuffix(_END)
