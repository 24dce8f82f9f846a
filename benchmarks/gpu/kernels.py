"""The kernels of a step side by side: attention, the head's loss, norms; forward and backward, milliseconds and peak memory.

Attention has Llama 3 8B's shape: 32 query heads, 8 of keys and values, width 128, 8192 positions, causal. It runs by each
backend of scaled_dot_product_attention, with grouped heads as springtide asks for them and with keys and values repeated; with
documents apart by a mask, by varlen_attn and by FlexAttention, where this torch has them. A backend that refuses is told with
its reason.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import claims
import cold
import torch
import torch.nn.functional as F
from measure import CUDA, DEVICE, NO_GPU, Book, NotHere, figure, median_ms, peak_gb, tidy
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from springtide.model import attention as attention_room
from springtide.model import loss
from springtide.model.attention import RMSNorm
from springtide.model.flex import attend, block_mask
from springtide.model.positions import document_firsts, documents
from springtide.parallel.compiled import compiled_flex, compiled_loss

HEADS, KV_HEADS, WIDTH, LENGTH = (32, 8, 128, 8192) if CUDA else (4, 2, 16, 64)
DOCUMENTS = 8
"""Of equal length in a row."""
TOKENS, DIM, IDS = (8192, 4096, 128256) if CUDA else (64, 32, 512)
TYPE = torch.bfloat16
ON_CPU = ("MATH", "FLASH")
"""Backends that a CPU has."""
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
SECONDS = 0.4 if CUDA else 0.02


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    attention(book)
    for logits in (2**27, 2**28, 2**29, 2**30) if CUDA else (2**12, 2**15):
        part = f"head loss/parts of 2^{logits.bit_length() - 1} logits"
        book.cell(part, lambda logits=logits: head_loss(logits, False))
        book.cell(f"{part}, compiled", lambda logits=logits: head_loss(logits, True), NO_GPU)
    book.cell("head loss/F.cross_entropy of all logits", lambda: whole_loss(False))
    book.cell("head loss/F.cross_entropy of all logits, compiled", lambda: whole_loss(True), NO_GPU)
    book.cell("logits/bf16, then fp32", lambda: logits_as_fp32(False))
    book.cell("logits/fp32 from the product", lambda: logits_as_fp32(True), NO_GPU)
    norm = RMSNorm(DIM, 1e-5)
    norm.weight.data = torch.ones(DIM)
    norm.to(DEVICE)
    book.cell("norm/RMSNorm", lambda: norms(norm))
    book.cell("norm/RMSNorm, compiled", lambda: norms(torch.compile(norm)), NO_GPU)
    book.cell("compiled code/a new node", compiled_code, NO_GPU)
    return comparisons(book)


def comparisons(book: Book) -> list[dict[str, Any]]:
    """How the default stands against the best of the others, as claims."""
    cells = book.values()
    found = []
    for group in ("attention, causal", "attention, documents apart"):
        default = cells.get(f"{group}/default")
        others = {name: one["ms"] for name, one in cells.items() if name.startswith(group) and "forward_ms" in one}
        if default and others:
            best = min(others, key=lambda name: others[name])
            detail = {"best": best, "ms": others}
            found.append(claims.claim(f"default_over_best {group}", default["ms"] / others[best], 1.1, "lower", detail))
    fused, steps = (cells.get(f"head loss/parts of 2^27 logits{how}") for how in (", compiled", ""))
    if fused and steps:
        found.append(claims.claim("compiled_over_single head loss", fused["ms"] / steps["ms"], 0.85, "lower"))
    if node := cells.get("compiled code/a new node"):
        share = (node["load_s with the run's code"] + node["ready_s with the run's code"]) / node["ready_s cold"]
        found.append(claims.claim("compiled_code_over_cold", share, 0.5, "lower", node))
    if exact := cells.get("attention, documents apart/default against the mask in fp32"):
        found.append(claims.claim("error_of_flex_over_mask", exact["error_over_masks"], 2.0, "lower", exact))
    return found


def attention(book: Book) -> None:
    """All its cells."""
    mask = _mask()
    for documents_apart in (False, True):
        group = "attention, documents apart" if documents_apart else "attention, causal"
        with_mask = mask if documents_apart else None
        if documents_apart:
            book.cell(f"{group}/default", ours, NO_GPU)
            book.cell(f"{group}/default against the mask in fp32", ours_against_the_mask, NO_GPU)
            book.cell(f"{group}/mask of one block of scores after the other", blocks_of_scores)
        masked = f"{group}/as with a mask" if documents_apart else f"{group}/default"
        book.cell(masked, lambda m=with_mask: sdpa("", m, as_the_decoder_does(m)))
        for name in BACKENDS:
            for repeated in (False, True):
                which = f"{name}{', heads repeated' if repeated else ''}"
                absent = "" if CUDA or BACKENDS[name].split("_")[0] in ON_CPU else NO_GPU
                book.cell(f"{group}/{which}", lambda n=name, m=with_mask, r=repeated: sdpa(BACKENDS[n], m, r), absent)
        book.cell(f"{group}/varlen_attn", lambda apart=documents_apart: varlen(apart), NO_GPU)
        book.cell(f"{group}/flex_attention, compiled", lambda apart=documents_apart: flex(apart), NO_GPU)


EOS, BOS = 0, 2


def _ids() -> Tensor:
    """A row that holds documents of one length."""
    ids = torch.ones(1, LENGTH, dtype=torch.int64, device=DEVICE)
    ids[:, LENGTH // DOCUMENTS - 1 :: LENGTH // DOCUMENTS] = EOS
    ids[:, :: LENGTH // DOCUMENTS] = BOS
    return ids


def _mask() -> Tensor:
    """The attention mask of that row: what the decoder makes where FlexAttention does not run."""
    return documents(_ids(), EOS, BOS)[1]


def ours() -> dict[str, Any]:
    """springtide's FlexAttention, as a compiled step calls it; the mask is made once a step for all layers."""
    kernel, q, k, v = compiled_flex(), _heads(HEADS), _heads(KV_HEADS), _heads(KV_HEADS)
    mask = block_mask(document_firsts(_ids(), EOS, BOS)[0])
    return both_ways(lambda: attend(kernel, q, k, v, mask, None, 0.0), [q, k, v], _attention_flops(True))


def ours_against_the_mask() -> dict[str, Any]:
    """How far results and gradients are from those in fp32 by a mask, and how far those in bf16 by the same mask."""
    q, k, v = (
        one.detach()[:, :, :2048].requires_grad_() for one in (_heads(HEADS), _heads(KV_HEADS), _heads(KV_HEADS))
    )
    firsts = document_firsts(_ids()[:, :2048], EOS, BOS)[0]
    dense = documents(_ids()[:, :2048], EOS, BOS)[1]
    kernel, mask = compiled_flex(), block_mask(firsts)

    def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=dense)

    def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    exact = results(by_mask, *(one.detach().float().requires_grad_() for one in (q, k, v)))
    found = {}
    for name, function in {"flex": lambda *i: attend(kernel, *i, mask, None, 0.0), "mask": by_mask}.items():
        errors = [(a.float() - b).norm() / b.norm() for a, b in zip(results(function, q, k, v), exact, strict=True)]
        found |= {f"{name}_{part}": float(f"{one.item():.3g}") for part, one in zip("oqkv", errors, strict=True)}
    return found | {"error_over_masks": max(found[f"flex_{one}"] / max(found[f"mask_{one}"], 1e-9) for one in "oqkv")}


def blocks_of_scores() -> dict[str, Any]:
    """What it takes to make the mask of a step, and the whole one."""
    ids = _ids()
    return {
        "ms": median_ms(lambda: block_mask(document_firsts(ids, EOS, BOS)[0]), SECONDS),
        "whole_ms": median_ms(lambda: documents(ids, EOS, BOS), SECONDS),
    }


def _heads(number: int) -> Tensor:
    return torch.randn(1, number, LENGTH, WIDTH, device=DEVICE, dtype=TYPE, requires_grad=True)


@contextlib.contextmanager
def _backend(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    if not hasattr(SDPBackend, name):
        raise NotHere(f"this torch has no SDPBackend.{name}")
    with sdpa_kernel([getattr(SDPBackend, name)]):
        yield


def sdpa(backend: str, mask: Tensor | None, repeated: bool) -> dict[str, Any]:
    """scaled_dot_product_attention; NotHere when the backend refuses."""
    q, k, v = _heads(HEADS), _heads(KV_HEADS), _heads(KV_HEADS)

    def forward() -> Tensor:
        keys, values = k, v
        if repeated:
            keys, values = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=not repeated
        )

    with _backend(backend):
        try:
            forward()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "out of memory" in str(error):
                raise NotHere(f"refuses: {str(error)[:300]}") from None
            raise
        return both_ways(forward, [q, k, v], _attention_flops(mask is not None))


def _attention_flops(apart: bool) -> float:
    """Of forward and backward; what the mask leaves out is not counted."""
    seen = LENGTH / DOCUMENTS if apart else LENGTH
    return 3.5 * 4 * HEADS * WIDTH * LENGTH * seen / 2


def as_the_decoder_does(mask: Tensor | None) -> bool:
    """Whether springtide repeats key and value heads here."""
    asks = getattr(attention_room, "_repeats_heads", None)
    return bool(asks and asks(_heads(HEADS), mask))


def varlen(apart: bool) -> dict[str, Any]:
    """torch.nn.attention.varlen.varlen_attn, which takes where documents begin."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise NotHere("this torch has no varlen_attn") from None
    takes = inspect.signature(varlen_attn).parameters
    grouped = "enable_gqa" in takes
    q = torch.randn(LENGTH, HEADS, WIDTH, device=DEVICE, dtype=TYPE, requires_grad=True)
    heads = KV_HEADS if grouped else HEADS
    k, v = (torch.randn(LENGTH, heads, WIDTH, device=DEVICE, dtype=TYPE, requires_grad=True) for _ in range(2))
    longest = LENGTH // DOCUMENTS if apart else LENGTH
    begins = torch.arange(0, LENGTH + 1, longest, device=DEVICE, dtype=torch.int32)
    named: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    named |= {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}  # the same under two names

    def forward() -> Tensor:
        return varlen_attn(q, k, v, begins, begins, longest, longest, **named)

    return both_ways(forward, [q, k, v], _attention_flops(apart)) | {"grouped": grouped}


def flex(apart: bool) -> dict[str, Any]:
    """FlexAttention, compiled, with its own form of the mask."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        raise NotHere("this torch has no flex_attention") from None
    longest = LENGTH // DOCUMENTS if apart else LENGTH

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query // longest == key // longest)

    blocks = create_block_mask(visible, None, None, LENGTH, LENGTH, device=str(DEVICE))
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = _heads(HEADS), _heads(KV_HEADS), _heads(KV_HEADS)
    return both_ways(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True), [q, k, v], _attention_flops(apart))


def both_ways(forward: Callable[[], Tensor], inputs: list[Tensor], flops: float = 0.0) -> dict[str, Any]:
    """Milliseconds of forward, and of forward and backward together; peak memory of the two."""

    def whole() -> None:
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    tidy()
    whole()
    peak = peak_gb()
    ms = median_ms(whole, SECONDS)
    with torch.no_grad():
        alone = median_ms(forward, SECONDS / 2)
    found = {"ms": ms, "forward_ms": alone, "peak_gb": peak}
    return found | ({"tflops": figure(flops / ms / 1e9)} if flops else {})


def compiled_code() -> dict[str, Any]:
    """Seconds until a block is ready on a cold node, on one that has the run's compiled code, and on that one again."""
    found = cold.nodes()
    values: dict[str, Any] = {f"{key} {name}": one[key] for name, one in found.items() for key in ("load_s", "ready_s")}
    return (
        values
        | {key: found["cold"][key] for key in ("save_s", "file_mb")}
        | {"loaded": found["with the run's code"]["loaded"]}
    )


def _head() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOKENS, DIM, device=DEVICE, dtype=TYPE, requires_grad=True)
    head = (0.02 * torch.randn(IDS, DIM, device=DEVICE)).to(TYPE).requires_grad_()
    return hidden, head, torch.randint(IDS, (TOKENS,), device=DEVICE)


def head_loss(logits: int, fused: bool) -> dict[str, Any]:
    """Measure springtide's head loss, ``logits`` logits at a time; ``fused``: as with ``parallel.compile``."""
    sizes = getattr(loss, "_LOGITS_AT_ONCE", None)
    if not isinstance(sizes, dict):
        raise NotHere("head_loss has no size of its parts any more")
    before, sizes[DEVICE.type] = sizes[DEVICE.type], logits
    try:
        hidden, head, wanted = _head()
        usual = " (the default)" if logits == before else ""
        named: dict[str, Any] = {"fused": compiled_loss()} if fused else {}
        inputs, flops = [hidden, head], 6.0 * TOKENS * DIM * IDS
        found = both_ways(lambda: loss.head_loss(hidden, head, wanted, **named)[0], inputs, flops)
        return found | {"parts": -(-TOKENS // max(1, logits // IDS)), "note": f"{logits}{usual}"}
    finally:
        sizes[DEVICE.type] = before


def whole_loss(compiled: bool) -> dict[str, Any]:
    """As one writes it: all logits, in fp32."""
    hidden, head, wanted = _head()

    def plain() -> Tensor:
        return F.cross_entropy((hidden @ head.T).float(), wanted, reduction="sum")

    forward = torch.compile(plain) if compiled else plain
    return both_ways(forward, [hidden, head], 6.0 * TOKENS * DIM * IDS) | {"parts": 1}


def logits_as_fp32(at_once: bool) -> dict[str, Any]:
    """Logits as the loss reads them: converted after the product, or written so by it."""
    hidden, head, _ = _head()
    part, rows = hidden.detach()[: max(1, 2**27 // IDS)], head.detach()
    product = (
        (lambda: torch.mm(part, rows.T, out_dtype=torch.float32)) if at_once else (lambda: (part @ rows.T).float())
    )
    return {"ms": median_ms(product, SECONDS), "tokens": len(part)}


def norms(function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A norm of a step's residual stream: how near it is to float64, and GB/s of the least that it must move."""
    x = torch.randn(TOKENS, DIM, device=DEVICE, dtype=TYPE, requires_grad=True)
    found = both_ways(lambda: function(x), [x])
    exact = x.detach().double()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    with torch.no_grad():
        error = ((function(x).double() - exact).norm() / exact.norm()).item()
    least = 5 * x.numel() * x.element_size()  # in and out; then in, gradient in, gradient out
    return found | {"gb_per_s": figure(least / found["ms"] / 1e6), "error": float(f"{error:.3g}")}
