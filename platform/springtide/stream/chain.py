"""The chain: one hash over all steps that a model was trained on, in order.

    chain 0 = ""
    chain n = BLAKE3(chain n-1, order step, digest of the sample ids, valid tokens, whether the update was applied)

The chain is part of the training state, so it identifies the history of the state's weights even without the journal (the run's
log of events). Every value in it comes from the step's one all-reduce, and is the same on every rank and at any world size.
"""

from __future__ import annotations

import struct

from springtide.config.steps import OrderStep
from springtide.storage.digest import of_bytes

SKIPPED_UPDATES_KEPT = 1000
"""The training state lists at most this many steps without an update, the newest ones. The chain covers all steps without an
update."""

_LINK = struct.Struct("<QQQ?")


def next_chain(chain: str, step: OrderStep, digest: int, tokens: int, updated: bool) -> str:
    """Return the chain (hash over all trained steps) after one more step, 32 hex digits.

    ``chain``: the chain before ``step``, empty before the first step; ``digest``: 64-bit digest of the sample ids of all ranks;
        ``tokens``: number of tokens in the loss; ``updated``: whether the weights were updated.
    """
    return of_bytes(bytes.fromhex(chain) + _LINK.pack(step, digest, tokens, updated))


def with_skipped_update(skipped_updates: tuple[OrderStep, ...], step: OrderStep) -> tuple[OrderStep, ...]:
    """Return the steps whose update was skipped, with ``step`` added; only the newest ``SKIPPED_UPDATES_KEPT`` are kept."""
    return (*skipped_updates, step)[-SKIPPED_UPDATES_KEPT:]
