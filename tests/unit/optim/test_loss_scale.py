"""The loss scale of fp16: found in a few steps whatever the global batch, then slow."""

from __future__ import annotations

import json

import pytest

from springtide.optim.loss_scale import LossScale


def overflows(scale: float, tokens: int) -> bool:
    """Whether a gradient overflows whose largest element is 1 for the loss of a token, as fp16 sees it."""
    return scale / tokens > 65504


@pytest.mark.parametrize("tokens", [2**12, 2**18, 2**22])
def test_it_is_found_in_a_few_steps_at_any_global_batch(tokens: int) -> None:
    """The loss is divided by the tokens of all ranks: a batch that is 64 times as large needs a scale that is as well."""
    scale, skipped, steps = LossScale(True), 0, 0
    while not overflows(scale.value * 2, tokens):
        overflowed = overflows(scale.value, tokens)
        skipped += overflowed
        scale.after(overflowed)
        steps += 1
        assert steps < 40, f"after {steps} steps the scale is {scale.value:g}"
        if scale.value == 2.0**32:
            break
    assert skipped <= 1


def test_it_moves_slowly_after_the_first_overflow_and_a_restart_changes_nothing() -> None:
    one = LossScale(True)
    for overflowed in (False, False, True):
        one.after(overflowed)
    other = LossScale(True)
    other.begin(json.loads(json.dumps(one.state())))
    for scale in (one, other):
        found = scale.value
        assert found == 2.0**17
        for _ in range(1999):
            scale.after(False)
        assert scale.value == found
        scale.after(False)
        assert scale.value == 2 * found


def test_other_types_are_not_scaled() -> None:
    scale = LossScale(False)
    scale.after(True)
    assert (scale.value, scale.state()) == (1.0, {})
