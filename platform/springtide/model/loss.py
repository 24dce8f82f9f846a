"""Cross-entropy of the output head, computed for some tokens at a time. The logits of a whole batch would often take more
memory than all other tensors of training, so they never exist at once.

Shape suffixes: N tokens, D width, V token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a token that does not count in the loss."""
_FP16_RANGE = 2.0**15
"""Half of fp16's largest number. The margin of 2 is for z-loss, which makes gradients of logits a little larger than 1."""
_LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""Device type -> number of logits computed at a time. On a CPU few logits fit into its caches, but too few make slow, thin
matrix products."""
_TILE = 128
"""The number of tokens whose logits are computed at a time is a multiple of this. On a GPU other numbers are slower, by half if
they are not divisible by 8."""
_CONVERTED_AT_ONCE = 2**22
"""Number of head weights that are converted to another dtype at a time."""


PartLoss = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor]]
"""Type of the compiled ``part_loss``."""


class LargestLogit:
    """Tracks the largest logit over all tokens that count in the loss."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), -torch.inf, device=device)
        """The largest logit, an fp32 scalar; -inf before the first call of ``see``."""

    @torch.no_grad()
    def see(self, logits_NV: Tensor, counts_N: Tensor) -> None:
        """Update the largest logit with the logits of some tokens, without synchronizing with the device. ``counts_N``: True
        for tokens that count in the loss, bool (N,)."""
        most_N = logits_NV.amax(-1).float().masked_fill(~counts_N, -torch.inf)
        self.value = torch.maximum(self.value, most_N.max())


_watchers: list[LargestLogit] = []
"""For each ``with logits_watched(largest)`` statement whose body is running, its ``largest``."""


@contextlib.contextmanager
def logits_watched(largest: LargestLogit) -> Iterator[None]:
    """Keep in ``largest`` the largest logit of all whose loss is computed in the ``with`` block, by any model."""
    _watchers.append(largest)
    try:
        yield
    finally:
        _watchers.remove(largest)


def are_watched() -> bool:
    """Return True inside a ``with logits_watched`` statement."""
    return bool(_watchers)


def see_logits(logits_NV: Tensor, counts_N: Tensor) -> None:
    """Update the ``largest`` of each running ``with logits_watched``. ``counts_N``: True for tokens that count in the loss,
    bool (N,)."""
    for one in _watchers:
        one.see(logits_NV.detach(), counts_N)


class _HeadLoss(torch.autograd.Function):
    """Autograd function of ``head_loss``. Forward computes not only the loss but also the gradients of hidden states and head,
    because the logits exist only in forward, for some tokens at a time. Backward only multiplies these gradients by the
    upstream gradient, a scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        wanted_N: Tensor,
        z_weight: float,
        cap: float,
        fused: PartLoss | None,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and cross-entropies as ``head_loss``. Saves the gradients of hidden states and head for backward."""
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_head_VD = torch.empty_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        nats_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        extra = hidden_ND.new_zeros((), dtype=torch.float32)
        parts = (hidden_ND.split(_at_once(head_VD)), wanted_N.split(_at_once(head_VD)))
        begin = 0
        for part_ND, ids_N in zip(*parts, strict=True):
            logits_NV, counts_N = logits(part_ND, head_VD), ids_N != IGNORE_INDEX
            if fused is None:
                found = _in_steps(logits_NV, ids_N, z_weight, cap, any(ctx.needs_input_grad[:2]))
            else:
                if _watchers:
                    see_logits(capped(logits_NV.float(), cap) if cap else logits_NV, counts_N)
                found = fused(logits_NV, ids_N, z_weight, cap)
            nats_N[begin : begin + len(part_ND)], grad_NV = found[0], found[2]
            if found[1] is not None:
                extra += found[1]
            # zero the rows of tokens that do not count in the (N, D) tensors, not in the (N, V) gradient of logits, which is
            # much larger
            if grad_hidden_ND is not None and grad_NV is not None:
                of_hidden_ND = grad_hidden_ND[begin : begin + len(part_ND)]
                _through(grad_NV, head_VD, of_hidden_ND)
                of_hidden_ND *= counts_N[:, None]
            if grad_head_VD is not None and grad_NV is not None:
                _add_product(grad_head_VD, grad_NV, part_ND * counts_N[:, None], is_first=begin == 0)
            begin += len(part_ND)
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(nats_N)
        return nats_N.sum() + extra, nats_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Return the gradients of hidden states and head: as saved, times the upstream gradient; None for a frozen input."""
        grad_hidden_ND, grad_head_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            grad_hidden_ND.mul_(grads[0])
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.mul_(grads[0]).to(ctx.head_dtype)
        return grad_hidden_ND, grad_head_VD, None, None, None, None


def _in_steps(
    logits_NV: Tensor, ids_N: Tensor, z_weight: float, cap: float, trains: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the results of ``part_loss`` by separate, uncompiled operations. The z-loss is None if ``z_weight`` is 0. The
    gradient of the logits is None if ``trains`` is False; it often reuses the memory of the logits."""
    dtype = logits_NV.dtype
    if cap:
        logits_NV = capped(logits_NV.float(), cap)
    counts_N, ids_N1 = ids_N != IGNORE_INDEX, ids_N.clamp_min(0)[:, None]
    see_logits(logits_NV, counts_N)
    wanted_logit_N1 = logits_NV.gather(-1, ids_N1).float()
    log_p_NV = F.log_softmax(logits_NV, -1, dtype=torch.float32)
    wanted_log_p_N1 = log_p_NV.gather(-1, ids_N1)
    log_sum_N1 = wanted_logit_N1 - wanted_log_p_N1
    nats_N = torch.mul(-wanted_log_p_N1[:, 0], counts_N)
    extra = z_weight * (log_sum_N1[:, 0].square() * counts_N).sum() if z_weight else None
    if not trains:
        return nats_N, extra, None
    # gradient of a logit: (p f - 1[target]) s. p: softmax of the logit; f: factor of z-loss; s: slope of the logit cap
    wanted_grad_N1 = wanted_log_p_N1.exp()
    if z_weight or cap:
        grad_NV = log_p_NV.exp_()
        if z_weight:
            factor_N1 = 1.0 + 2.0 * z_weight * log_sum_N1
            grad_NV *= factor_N1
            wanted_grad_N1 *= factor_N1
        wanted_grad_N1 -= 1.0
        if cap:
            grad_NV *= 1.0 - (logits_NV / cap).square()
            wanted_grad_N1 *= 1.0 - (wanted_logit_N1 / cap).square()
        grad_NV = grad_NV.to(dtype)
    else:
        wanted_grad_N1 -= 1.0
        grad_NV = torch.exp(log_p_NV, out=logits_NV)  # write into the logits' memory, with only one rounding
    return nats_N, extra, grad_NV.scatter_(-1, ids_N1, wanted_grad_N1.type_as(grad_NV))


def part_loss(logits_NV: Tensor, ids_N: Tensor, z_weight: float, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy of some tokens, fp32 (N,), their summed z-loss, and the gradient of their logits, (N, V). The
    gradient is not masked: it is nonzero for tokens that do not count. Written to be compiled into few passes over the logits.

    Args:
        logits_NV: logits before the cap.
        ids_N: target ids, or IGNORE_INDEX.
        z_weight: as for ``head_loss``.
        cap: as for ``capped``.
    """
    counts_N, ids_N1 = ids_N != IGNORE_INDEX, ids_N.clamp_min(0)[:, None]
    capped_NV = capped(logits_NV.float(), cap)
    log_sum_N1 = capped_NV.logsumexp(-1, keepdim=True)
    wanted_N1 = capped_NV.gather(-1, ids_N1)
    nats_N = (log_sum_N1 - wanted_N1)[:, 0] * counts_N
    extra = z_weight * (log_sum_N1[:, 0].square() * counts_N).sum()
    is_wanted_NV = torch.arange(logits_NV.shape[1], device=ids_N.device) == ids_N1
    grad_NV = (capped_NV - log_sum_N1).exp() * (1.0 + 2.0 * z_weight * log_sum_N1) - is_wanted_NV.float()
    if cap:
        grad_NV = grad_NV * (1.0 - (capped_NV / cap).square())
    return nats_N, extra, grad_NV.type_as(logits_NV)


def _add_product(total_VD: Tensor, grad_NV: Tensor, part_ND: Tensor, is_first: bool) -> None:
    """Add ``grad_NV.T @ part_ND`` to ``total_VD``, fp32. If ``is_first``, ``total_VD`` is uninitialized: overwrite it."""
    if grad_NV.is_cuda and grad_NV.dtype in (torch.bfloat16, torch.float16):
        # accumulate in fp32 within the matmul: no rounding between calls, and a single pass over total_VD
        beta = 0.0 if is_first else 1.0
        torch.addmm(total_VD, grad_NV.T, part_ND, beta=beta, out_dtype=torch.float32, out=total_VD)
        return
    of_part_VD = _product_in_range(grad_NV, part_ND)
    _ = total_VD.copy_(of_part_VD) if is_first else total_VD.add_(of_part_VD)


def _product_in_range(grad_NV: Tensor, part_ND: Tensor) -> Tensor:
    """Return ``grad_NV.T @ part_ND``, (V, D), without overflow in fp16. A sum over many tokens may overflow in fp16, however
    small the loss scale is. So fp16 hidden states are first divided by a power of two that excludes overflow, and the result is
    multiplied by it."""
    if part_ND.dtype != torch.float16:
        return grad_NV.T @ part_ND
    most = part_ND.abs().amax().float() * len(part_ND)  # a logit's gradient is in about [-1, 1]
    down = torch.exp2(
        torch.log2(most / _FP16_RANGE).ceil().clamp(0.0, 15.0)
    ).half()  # keep this number on the device: reading it would synchronize with the device
    return (grad_NV.T @ (part_ND / down)).float() * down


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap`` tanh(logits / ``cap``) (Gemma 2, arXiv 2408.00118, section 2); the logits themselves if ``cap`` is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def logits(hidden: Tensor, head_VD: Tensor) -> Tensor:
    """Return the logits (..., V) of hidden states (..., D), in the dtype of the hidden states. If the head has another dtype,
    only some of its rows are converted at a time: the head is the largest tensor of a small model, and a converted copy would
    take as much memory again."""
    if hidden.dtype == head_VD.dtype:
        return F.linear(hidden, head_VD)
    return torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in _parts(head_VD)], -1)


def _through(grad_NV: Tensor, head_VD: Tensor, out_ND: Tensor) -> None:
    """Write the gradient of hidden states to ``out_ND``, given the gradient of their logits, ``grad_NV``."""
    if grad_NV.dtype == head_VD.dtype:
        torch.matmul(grad_NV, head_VD, out=out_ND)
        return
    out_ND.zero_()
    parts = _parts(head_VD)
    for of_rows, rows in zip(grad_NV.split([len(one) for one in parts], 1), parts, strict=True):
        out_ND.addmm_(of_rows, rows.to(grad_NV.dtype))


def _parts(head_VD: Tensor) -> tuple[Tensor, ...]:
    return head_VD.split(max(1, _CONVERTED_AT_ONCE // head_VD.shape[1]))


def head_loss(
    hidden_ND: Tensor,
    head_VD: Tensor,
    wanted_N: Tensor,
    z_weight: float = 0.0,
    cap: float = 0.0,
    fused: PartLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over tokens, an fp32 scalar, and the cross-entropy of each token, fp32 (N,). The cross-entropy is
    0 for tokens that do not count, and has no gradient.

    ``wanted_N``: int64 target ids; IGNORE_INDEX for tokens that do not count. The loss adds z-loss: ``z_weight`` times the
    squared logarithm of the softmax's denominator, which keeps logits from drifting (Chowdhery et al., PaLM, 2022, section 5).
    ``cap``: as for ``capped``. ``fused``: compiled ``part_loss``; None: compute with separate, uncompiled operations.
    """
    total, nats_N = _HeadLoss.apply(hidden_ND, head_VD, wanted_N, z_weight, cap, fused)
    return total, nats_N


@torch.no_grad()
def token_nats(hidden_ND: Tensor, head_VD: Tensor, wanted_N: Tensor, cap: float = 0.0) -> Tensor:
    """Return the cross-entropy of each token, fp32 (N,), without gradients; 0 where ``wanted_N`` is IGNORE_INDEX. ``cap``: as
    for ``capped``."""
    parts = zip(hidden_ND.split(_at_once(head_VD)), wanted_N.split(_at_once(head_VD)), strict=True)
    found = [
        F.cross_entropy(
            capped(logits(part_ND, head_VD).float(), cap), ids_N, ignore_index=IGNORE_INDEX, reduction="none"
        )
        for part_ND, ids_N in parts
    ]
    return torch.cat(found)


@contextlib.contextmanager
def logits_as_on(device_type: str) -> Iterator[None]:
    """In the ``with`` body, compute logits on the CPU in portions of the size used on ``device_type``, to predict the memory of
    such a device."""
    before = _LOGITS_AT_ONCE["cpu"]
    _LOGITS_AT_ONCE["cpu"] = _LOGITS_AT_ONCE[device_type]
    try:
        yield
    finally:
        _LOGITS_AT_ONCE["cpu"] = before


def _at_once(head_VD: Tensor) -> int:
    """Return the number of tokens whose logits are computed at a time. If it is above ``_TILE``, it is a multiple of
    ``_TILE``."""
    most = max(1, _LOGITS_AT_ONCE[head_VD.device.type] // len(head_VD))
    return most - most % _TILE if most > _TILE else most
