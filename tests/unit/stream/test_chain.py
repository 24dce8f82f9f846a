"""The chain of steps: what is in it, and its values for good."""

from __future__ import annotations

import itertools

from springtide.config.steps import OrderStep
from springtide.stream.chain import SKIPPED_UPDATES_KEPT, next_chain, with_skipped_update

HISTORY = [(0, 0x0123456789ABCDEF, 768, True), (1, 2**64 - 1, 740, False), (3, 0, 2**40, True)]
"""(step of the order, digest, valid tokens, whether the update was applied); step 2 is skipped."""


def chain_of(history: list[tuple[int, int, int, bool]]) -> str:
    chain = ""
    for step, digest, tokens, updated in history:
        chain = next_chain(chain, OrderStep(step), digest, tokens, updated)
    return chain


def test_the_chain_of_a_history_never_changes() -> None:
    """Every checkpoint ever written has such a value: do not edit these; raise the format of checkpoints."""
    assert chain_of(HISTORY[:1]) == "2b4ca68d6337f57fca7b224aac0cc43e"
    assert chain_of(HISTORY) == "a6192d0dc8cfbe17f1b2aae68f26a4f7"


def test_every_value_of_every_step_and_their_order_are_in_it() -> None:
    step, digest, tokens, _ = HISTORY[1]
    changed = [(step + 1, digest, tokens, False), (step, digest - 1, tokens, False), (step, digest, tokens // 2, False)]
    changed.append((step, digest, tokens, True))
    histories = [list(one) for size in range(4) for one in itertools.permutations(HISTORY, size)]
    histories += [[HISTORY[0], one, HISTORY[2]] for one in changed]
    chains = [chain_of(one) for one in histories]
    assert len(set(chains)) == len(histories) == 16 + 4


def test_the_newest_steps_without_an_update_are_listed() -> None:
    skipped_updates: tuple[OrderStep, ...] = ()
    for step in range(5, 5 + 2 * (SKIPPED_UPDATES_KEPT + 7), 2):
        skipped_updates = with_skipped_update(skipped_updates, OrderStep(step))
    assert skipped_updates == tuple(range(5 + 2 * 7, 5 + 2 * (SKIPPED_UPDATES_KEPT + 7), 2))
