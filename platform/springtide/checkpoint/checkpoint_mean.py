"""Average the weights of checkpoints into a new checkpoint that holds weights only (Izmailov et al., "Averaging weights leads
to wider optima", 2018; for the mean of the latest checkpoints: Kaddour, "Stop wasting my time!", 2022).

    for each part (rows of tensors, 128 MiB): read the part from every checkpoint, average in float64, write a data file
    then: the manifest and COMMITTED

Memory use depends on the size of a part, not on the size of the model. Checksums are verified as bytes are read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.averages import as_weights
from springtide.checkpoint.format import (
    AVERAGED,
    Manifest,
    Meta,
    Piece,
    StagedPiece,
    checkpoints,
    read_manifest,
)
from springtide.checkpoint.load import by_tensor, read_boxes, read_pieces
from springtide.checkpoint.tensors import Box, raw, type_of
from springtide.checkpoint.weights_only import PART_BYTES, write_weights
from springtide.errors import CheckpointError
from springtide.storage import Folder

_Tensors = dict[str, list[Piece]]


def average_checkpoints(
    run: Folder,
    names: Sequence[str],
    to: Folder,
    config: Mapping[str, Any],
    ema: bool = False,
    part_bytes: int = PART_BYTES,
) -> Manifest:
    """Write the mean of the weights of several checkpoints as a new checkpoint of the run ``to``.

    The step and the integer tensors are those of the newest averaged checkpoint.

    Args:
        run: the run that the checkpoints belong to.
        names: names of the checkpoints, oldest first.
        to: the run that gets the new checkpoint.
        config: the config that is stored with the new checkpoint.
        ema: average the exponential moving averages of the weights instead of the weights.
        part_bytes: largest number of bytes that are averaged at a time.

    Returns:
        The manifest of the new checkpoint.

    Raises:
        CheckpointError: the checkpoints are of different models, or bytes are bad.
        MissingAverage: with ``ema``, a checkpoint has no averaged weights.
    """
    manifests = [read_manifest(run, name) for name in names]
    each = [_weights(run, name, manifest, ema) for name, manifest in zip(names, manifests, strict=True)]
    for name, tensors in zip(names, each, strict=True):
        _check_same(names[-1], each[-1], name, tensors)
    kinds = {name: (pieces[0].dtype, pieces[0].shape) for name, pieces in each[-1].items()}
    meta = _meta(manifests[-1].meta, names)
    return write_weights(to, meta, config, kinds, lambda one: _mean(run, each, one), part_bytes)


def _weights(run: Folder, name: str, manifest: Manifest, ema: bool) -> _Tensors:
    """Return the pieces (stored parts) of each weight of a checkpoint, by the weight's name. ``ema``: return the pieces of each
    weight's moving average instead."""
    pieces = read_pieces(run, name, manifest)
    # with ``ema``, the pieces of averages get the names of weights; reads use file and offset, so the new name does no harm
    weights = as_weights(pieces) if ema else [one for one in pieces if one.tensor.startswith("model/")]
    return dict(sorted(by_tensor(weights).items()))


def _check_same(newest: str, there: _Tensors, name: str, here: _Tensors) -> None:
    for tensor in sorted(there.keys() | here.keys()):
        kinds = [(one[0].dtype, one[0].shape) if (one := side.get(tensor)) else None for side in (there, here)]
        if kinds[0] != kinds[1]:
            shown = [f"{kind[0]} {kind[1]}" if kind else "missing" for kind in kinds]
            raise CheckpointError(f"{newest} and {name} are of different models: {tensor} is {shown[0]} and {shown[1]}")


def _mean(run: Folder, each: Sequence[_Tensors], one: StagedPiece) -> Tensor:
    """Return the mean of the box ``one`` (part of a tensor) over the checkpoints ``each``, as raw bytes, uint8 (bytes,)."""
    dtype = type_of(one.dtype)
    total: Tensor | None = None
    for tensors in each if dtype.is_floating_point else each[-1:]:
        found = torch.empty(one.sizes, dtype=dtype)
        read_boxes(checkpoints(run), tensors[one.tensor], found, Box(one.offsets, one.sizes))
        if not dtype.is_floating_point or len(each) == 1:
            return raw(found)
        total = found.double() if total is None else total.add_(found)
    assert total is not None
    return raw(total.div_(len(each)).to(dtype))


def _meta(newest: Meta, names: Sequence[str]) -> Meta:
    """Return the metadata of the averaged checkpoint. Its chain (hash over all trained steps) is empty, because no sequence of
    training steps leads to averaged weights."""
    changes: dict[str, Any] = {"chain": "", "skipped_updates": (), "metrics": {}, "components": {}}
    changes |= {"saved_s": time.time(), "labels": {**newest.labels, AVERAGED: " ".join(names)}}
    return newest.model_copy(update=changes)
