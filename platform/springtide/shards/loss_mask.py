"""The loss mask, stored in the token ids: the top bit marks a token that is not predicted, the bits below it are the token's
id.

stored      uint16, uint32   top bit | id               in shards, batches and everything that copies rows
for a step  int64            id, or ~id (negative)      one tensor holds ids and mask
"""

from __future__ import annotations

import numpy as np

IGNORE_INDEX = -100
"""Target of a token that is not predicted, which torch's cross-entropy ignores by default."""


def most_ids(token_type: str, has_loss_mask: bool) -> int:
    """Return how many different ids a token type can hold. A loss mask occupies the top bit, which halves this number. In
    uint32 the top bit is always reserved for the mask."""
    bits = np.iinfo(token_type).bits
    return 2 ** (bits - (has_loss_mask or bits == 32))


def memory_type(token_type: str, vocab_size: int) -> str:
    """Return the type of tokens in memory, where the top bit is always the loss mask: ``token_type``, or uint32 if the ids of
    the vocabulary need the top bit of ``token_type``."""
    return token_type if vocab_size <= most_ids(token_type, True) else "uint32"


def masked(tokens: np.ndarray) -> np.ndarray:
    """Return ``tokens`` with every token marked as not predicted; the ids do not change."""
    return tokens | _top_bit(tokens)


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of ``tokens``, in the same type."""
    return tokens & ~_top_bit(tokens)


def is_predicted(tokens: np.ndarray) -> np.ndarray:
    """Return one bool per token: True if the token is a target of the loss."""
    return tokens < _top_bit(tokens)


def signed(tokens: np.ndarray) -> np.ndarray:
    """Return tokens in the form that a training step uses, int64: the id, or ``~id`` if the token is not predicted.

    >>> signed(masked(np.array([7], dtype=np.uint16))).tolist()
    [-8]
    """
    return np.where(is_predicted(tokens), tokens, ~ids_of(tokens).astype(np.int64)).astype(np.int64)


def _top_bit(tokens: np.ndarray) -> np.unsignedinteger:
    return tokens.dtype.type(1 << (np.iinfo(tokens.dtype).bits - 1))
