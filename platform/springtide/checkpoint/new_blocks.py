"""Load a checkpoint of a shallower model into a decoder with additional blocks (Wu et al., "LLaMA Pro: Progressive LLaMA with
Block Expansion", 2024).

Each new block begins as a copy of the block before it, but with output matrices of zero. So it adds nothing to the residual
stream, and the deeper model at first computes the same as the shallower one.

    number in the checkpoint   0   1           2   3
    number in this model       0   1   2 new   3   4   5 new
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from springtide.checkpoint.format import Piece
from springtide.checkpoint.tensors import local
from springtide.config.engine import BLOCK_OUTPUTS

_BLOCKS = "model/blocks."


def with_new_blocks(pieces: Sequence[Piece], new_blocks: Sequence[int]) -> list[Piece]:
    """Return the pieces of a checkpoint (stored tensor parts), renamed to the tensors of the deeper model.

    Decoder blocks get their numbers in the deeper model. A new block gets the pieces of the block before it, except pieces of
    output matrices. ``new_blocks``: numbers of the new blocks in the deeper model (``train.new_blocks``).
    """
    stored = {_number(piece.tensor) for piece in pieces} - {-1}
    sources, taken = dict[int, list[int]](), 0
    for number in range(len(stored) + len(new_blocks)):
        if number not in new_blocks:
            taken += 1
        sources.setdefault(max(0, taken - 1), []).append(number)
    found = []
    for piece in pieces:
        number = _number(piece.tensor)
        if number < 0:
            found.append(piece)
            continue
        rest = piece.tensor.removeprefix(f"{_BLOCKS}{number}.")
        for here in sources.get(number, [number]):
            if not (here in new_blocks and rest.endswith(BLOCK_OUTPUTS)):
                found.append(piece._replace(tensor=f"{_BLOCKS}{here}.{rest}"))
    return found


def new_outputs(names: Iterable[str], new_blocks: Sequence[int]) -> set[str]:
    """Return the tensors among ``names`` that are output matrices of new blocks; they begin at zero."""
    return {name for name in names if _number(name) in new_blocks and name.endswith(BLOCK_OUTPUTS)}


@torch.no_grad()
def without_new_outputs(tensors: Mapping[str, Tensor], new_blocks: Sequence[int]) -> dict[str, Tensor]:
    """Fill this rank's part of the output matrices of new blocks with zeros. Returns the rest of ``tensors``, which must be
    loaded from the checkpoint."""
    outputs = new_outputs(tensors, new_blocks)
    for name in outputs:
        local(tensors[name]).zero_()
    return {name: tensor for name, tensor in tensors.items() if name not in outputs}


def _number(tensor: str) -> int:
    """Return the number of the block that the tensor named ``tensor`` belongs to; -1 if it is in no block."""
    if not tensor.startswith(_BLOCKS):
        return -1
    number = tensor.removeprefix(_BLOCKS).partition(".")[0]
    return int(number) if number.isascii() and number.isdecimal() else -1
