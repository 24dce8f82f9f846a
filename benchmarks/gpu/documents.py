"""What it costs a step to keep the documents of a row apart, and whether FlexAttention is as exact as a mask.

Both variants train on the same rows of eight documents; one lets each token attend to its own document only. A second cell
compares the results and gradients of FlexAttention in bf16 with those of a mask in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import claims
import torch
import torch.nn.functional as F
from eight_bits import LAYERS, LENGTH, VOCABULARY, large_config
from measure import BEGIN, CUDA, DEVICE, END, NO_GPU, Book, Variant, alternate, rows_of_documents
from torch import Tensor

from springtide.distributed.compiled import compiled_flex
from springtide.model.flex import attend, block_mask
from springtide.model.positions import document_firsts, documents

DOCUMENTS = 8
"""In a row, of one length."""
COST_GOAL, ERROR_GOAL = 1.05, 2.0
HEADS, KV_HEADS, WIDTH, SHORT = 32, 8, 128, 2048
"""Llama 3 8B's attention, on a row that is short enough for a mask."""


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    exact = book.cell("FlexAttention against a mask in fp32", errors, NO_GPU, is_timed=False)
    config = large_config()
    variants = {"documents attend to each other": Variant(config), "documents apart": Variant(config, eos_id=END)}
    rows = rows_of_documents(1 if CUDA else 4, LENGTH, VOCABULARY, DOCUMENTS)
    name = f"8B's shape, {LAYERS} layers" if CUDA else "tiny"
    rounds, seconds = (1, 0.2) if book.quick else (2, 4.0)
    found = book.cell(name, lambda: alternate(variants, rows, VOCABULARY, rounds, seconds))
    claimed = []
    if found and CUDA:
        whole, apart = (found[name]["step_s"] for name in variants)
        claimed.append(
            claims.claim("step with documents apart over one without", apart / whole, COST_GOAL, "lower", found)
        )
    if exact:
        claimed.append(
            claims.claim("error of FlexAttention over a mask's", exact["over_mask"], ERROR_GOAL, "lower", exact)
        )
    return claimed


def errors() -> dict[str, Any]:
    """Measure how far results and gradients in bf16 are from those of a mask in fp32, by FlexAttention and by the same mask."""
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, heads, SHORT, WIDTH, device=DEVICE, dtype=torch.bfloat16) for heads in shapes)
    ids = rows_of_documents(1, SHORT, VOCABULARY, DOCUMENTS)[:, :SHORT]
    kernel, blocks = compiled_flex(), block_mask(document_firsts(ids, END, BEGIN)[0])
    dense = documents(ids, END, BEGIN)[1]

    def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=dense)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(kernel, q, k, v, blocks, None, 0.0)

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [one.to(dtype).requires_grad_() for one in (q, k, v)]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    exact, found = results(by_mask, torch.float32), dict[str, Any]()
    for name, function in {"flex": by_flex, "mask": by_mask}.items():
        pairs = zip("oqkv", results(function, torch.bfloat16), exact, strict=True)
        found |= {f"{name}_{part}": float(f"{((a.float() - b).norm() / b.norm()).item():.3g}") for part, a, b in pairs}
    return found | {"over_mask": max(found[f"flex_{part}"] / max(found[f"mask_{part}"], 1e-9) for part in "oqkv")}
