"""The chain: one hash over all steps that a model was trained on, in order.

    chain 0 = ""
    chain n = BLAKE3(chain n-1, index of the step in the order of samples, digest of the sample ids, number of valid tokens,
                     whether the update was applied)

The chain is part of the training state, so it identifies the history of the state's weights even without the journal (the run's
log of events). Every value in it comes from the step's one all-reduce, and is the same on every rank and at any world size.
"""

from __future__ import annotations

import struct

from springtide.config.steps import OrderStep
from springtide.storage.digest import of_bytes

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
