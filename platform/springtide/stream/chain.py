"""What a model was trained on: the ids of its samples, the digest of a set of samples, and the chain over all steps.

    sample id    number of the corpus and number of the row in it, in one integer
    digest       of the samples of one step: a sum of hashes, so that their order and the world size do not matter
    chain 0      ""
    chain n      BLAKE3(chain n-1, order step, digest, valid tokens, whether the update was applied)

The chain is part of the training state, so it identifies the history of the state's weights even without the journal (the run's
log of events). Every value in it comes from the step's one all-reduce, and is the same on every rank and at any world size.
"""

from __future__ import annotations

import struct

import numpy as np

from springtide.config.steps import OrderStep
from springtide.storage.digest import mix, of_bytes

_CORPUS_SHIFT = np.uint64(48)
MOST_CORPORA = 2**16


def join(corpus: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the sample ids, uint64 (n,), of the row numbers ``rows``, int (n,). ``corpus``: number of the corpus, one for all
    rows or one per row."""
    return (np.asarray(corpus).astype(np.uint64) << _CORPUS_SHIFT) | rows.astype(np.uint64)


def corpus_and_row(sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus number of each sample id, and the row number in that corpus, int64 (n,) each."""
    ids = sample_ids.astype(np.uint64)
    rows = ids & ((np.uint64(1) << _CORPUS_SHIFT) - np.uint64(1))
    return (ids >> _CORPUS_SHIFT).astype(np.int64), rows.astype(np.int64)


def digest(sample_ids: np.ndarray) -> int:
    """Return a 64-bit digest of a set of sample ids, independent of their order: the sum of their hashes mod 2**64.

    The digest of a batch is the sum of its ranks' digests, so each rank can compute the digest of its own rows.
    """
    return int(np.sum(mix(sample_ids), dtype=np.uint64)) if len(sample_ids) else 0


SKIPPED_UPDATES_KEPT = 1000
"""Most steps that the training state lists as steps without a weight update; the newest are kept. The chain also covers older
steps without an update."""

_LINK = struct.Struct("<QQQ?")


def next_chain(chain: str, step: OrderStep, digest: int, tokens: int, updated: bool) -> str:
    """Return the chain (hash over all trained steps) after one more step, 32 hex digits.

    ``chain``: the chain before ``step``, empty before the first step; ``digest``: 64-bit digest of the sample ids of all ranks;
        ``tokens``: number of tokens in the loss; ``updated``: whether the weights were updated.
    """
    return of_bytes(bytes.fromhex(chain) + _LINK.pack(step, digest, tokens, updated))


def with_skipped_update(skipped_updates: tuple[OrderStep, ...], step: OrderStep) -> tuple[OrderStep, ...]:
    """Return the list of steps whose weight update was skipped, with ``step`` added. Only the newest ``SKIPPED_UPDATES_KEPT``
    steps are kept."""
    return (*skipped_updates, step)[-SKIPPED_UPDATES_KEPT:]
