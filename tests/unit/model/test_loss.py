"""The loss that never sees all logits, against the one that does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from springtide.model import loss
from springtide.model.loss import IGNORE_INDEX, LargestLogit, PartLoss, head_loss, logits_watched, part_loss


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, 16, generator=generator).requires_grad_()
    head = torch.randn(50, 16, generator=generator).requires_grad_()
    wanted = torch.randint(0, 50, (37,), generator=generator)
    wanted[::5] = IGNORE_INDEX
    return hidden, head, wanted


@pytest.mark.parametrize("fused", [None, part_loss], ids=["in steps", "fused"])
@pytest.mark.parametrize("tokens_at_once", [1, 7, 37, 100])
@pytest.mark.parametrize("z_weight", [0.0, 0.01])
def test_it_is_cross_entropy_and_so_are_its_gradients(
    tokens_at_once: int, z_weight: float, fused: PartLoss | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss._LOGITS_AT_ONCE, "cpu", 50 * tokens_at_once)
    hidden, head, wanted = problem()
    total, nats_N = head_loss(hidden, head, wanted, z_weight, fused=fused)
    (total * 0.3).backward()
    expected_hidden, expected_head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    logits = expected_hidden @ expected_head.T
    each = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="none")
    cross_entropy = each.sum()
    squares = logits.logsumexp(-1).square()[wanted != IGNORE_INDEX].sum()
    ((cross_entropy + z_weight * squares) * 0.3).backward()
    torch.testing.assert_close(nats_N, each.detach())
    assert not nats_N.requires_grad
    torch.testing.assert_close(total, cross_entropy + z_weight * squares)
    torch.testing.assert_close(hidden.grad, expected_hidden.grad)
    torch.testing.assert_close(head.grad, expected_head.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_is_that_in_steps_with_a_cap_and_the_largest_logit(dtype: torch.dtype) -> None:
    found = []
    for fused in (None, part_loss):
        hidden, head, wanted = problem()
        half = hidden.detach().to(dtype).requires_grad_(), head.detach().to(dtype).requires_grad_()
        largest = LargestLogit(hidden.device)
        with logits_watched(largest):
            total, nats_N = head_loss(*half, wanted, 0.01, 4.0, fused)
        total.backward()
        assert all(one.grad is not None and one.grad.dtype == dtype for one in half)
        found.append([total.detach(), nats_N, largest.value, *(one.grad for one in half)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-4)


def test_tokens_that_count_for_nothing_have_no_gradient_and_none_is_made_without_training() -> None:
    hidden, head, wanted = problem()
    total, _ = head_loss(hidden, head, wanted)
    total.backward()
    assert hidden.grad is not None
    assert not hidden.grad[::5].any()
    assert hidden.grad[1::5].any()
    with torch.no_grad():
        again, nats_N = head_loss(hidden, head, wanted)
    assert not again.requires_grad
    torch.testing.assert_close(again, total.detach())
    assert nats_N.sum() == again


@pytest.mark.parametrize("frozen", ["nothing", "head", "hidden", "both"])
def test_what_is_frozen_costs_no_product_and_changes_no_bit_of_the_rest(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss._LOGITS_AT_ONCE, "cpu", 50 * 10)  # four parts
    hidden, head, wanted = problem()
    usual, _ = head_loss(hidden, head, wanted, 0.01)
    (usual * 0.3).backward()
    some_hidden = hidden.detach().requires_grad_(frozen not in ("hidden", "both"))
    some_head = head.detach().requires_grad_(frozen not in ("head", "both"))
    with FlopCounterMode(display=False) as counter:
        total, _ = head_loss(some_hidden, some_head, wanted, 0.01)
        if total.requires_grad:
            (total * 0.3).backward()
    assert total == usual
    products = 1 + some_hidden.requires_grad + some_head.requires_grad
    assert counter.get_total_flops() == products * 2 * hidden.numel() * len(head)
    for one, before in ((some_hidden, hidden), (some_head, head)):
        assert (one.grad is not None) == one.requires_grad
        if one.grad is not None:
            assert before.grad is not None
            assert torch.equal(one.grad, before.grad)


def test_the_heads_gradient_in_fp16_does_not_overflow_in_a_sum_over_many_tokens() -> None:
    """A small vocabulary, a strong channel and a frequent id: the sum over the tokens is above fp16's largest number, the
    gradient of the mean loss is not."""
    tokens, width, ids = 2**15, 16, 320
    assert loss._LOGITS_AT_ONCE["cuda"] // ids > tokens  # all at once
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    hidden[:, 3] = 11.0
    head = torch.randn(ids, width, generator=generator) * 0.02
    wanted = torch.randint(0, ids, (tokens,), generator=generator)
    wanted[::5] = 7
    found = {}
    for dtype in (torch.float16, torch.float32):
        inputs = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
        with loss.logits_as_on("cuda"):
            total, _ = head_loss(*inputs, wanted)
        (total * (4.0 / tokens)).backward()
        found[dtype] = [one.grad.float() for one in inputs if one.grad is not None]
    for half, full in zip(found[torch.float16], found[torch.float32], strict=True):
        assert torch.isfinite(half).all()
        assert (half - full).norm() < 0.01 * full.norm()
