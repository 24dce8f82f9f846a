"""The chain: one hash for all steps that a model was trained on, in their order.

    chain 0 = ""
    chain n = BLAKE3(chain n-1, order step, digest of the sample ids, valid tokens, whether the update was applied)

It is part of the training state and goes where the state goes, so it is the history of the weights beside it, whatever became
of the journal. Every value in it comes from the step's one all-reduce and is the same on every rank and at any world size.
"""

from __future__ import annotations

import struct

from springtide.config.steps import OrderStep
from springtide.storage.digest import of_bytes

SKIPPED_UPDATES_KEPT = 1000
"""Number of the newest steps without an update that the state lists; the chain covers all of them."""

_LINK = struct.Struct("<QQQ?")


def next_chain(chain: str, step: OrderStep, digest: int, tokens: int, updated: bool) -> str:
    """Return the chain after one more step, 32 hex digits.

    ``chain``: of the steps before, empty before the first; ``digest``: of the sample ids of all ranks, 64 bits; ``tokens``:
    those that counted in the loss; ``updated``: whether the weights changed.
    """
    return of_bytes(bytes.fromhex(chain) + _LINK.pack(step, digest, tokens, updated))


def with_skipped_update(skipped_updates: tuple[OrderStep, ...], step: OrderStep) -> tuple[OrderStep, ...]:
    """Return the steps whose update was skipped, ``step`` too; no more than the newest ``SKIPPED_UPDATES_KEPT``."""
    return (*skipped_updates, step)[-SKIPPED_UPDATES_KEPT:]
