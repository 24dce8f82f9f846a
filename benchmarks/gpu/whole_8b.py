"""All 32 layers of Llama 3 8B on one device: does it fit, how fast, and is the peak of memory what was predicted?

int8 moments      AdamW's moments take 2 bytes a weight; everything is on the device
offload           shards of weights, gradients and moments, in fp32, are in the memory of the host
"""

from __future__ import annotations

import os
import resource
from typing import Any

import claims
import torch
from measure import CUDA, GIGA, NO_GPU, Book, NotHere, Variant, alternate, figure, random_rows

from springtide import config as configs
from springtide.config import Config
from springtide.model import skeleton
from springtide.planning.device_memory import CONTEXT_BYTES

VOCABULARY, LENGTH = (128256, 8192) if CUDA else (256, 64)
OFF = 0.1
"""Most that the peak may differ from the prediction, of the prediction."""
ON_HOST = 18
"""Bytes a weight on the host with ``parallel.offload: parameters``: fp32 weights, gradients and moments, and copies of them."""
PUBLISHED = 10_471
"""Tokens/s of 7B in bf16 on one H200, as reported by others; how they count is not known."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "int8 moments": {"optim.moments": "int8", "parallel.recompute": "full"},
    "offload": {"parallel.offload": "parameters", "parallel.recompute": "full", "parallel.compile": False},
}


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    context = book.cell("before the first tensor", before, NO_GPU, is_timed=False)
    claimed = []
    for name, changes in LAYOUTS.items():
        config = whole().override(changes)
        found = book.cell(f"8B, {name}", lambda config=config, name=name: step(config, name, book.quick))
        if found and CUDA:
            if predicted := found[name].get("predicted_gb"):
                away = abs(found[name]["peak_gb"] / predicted - 1)
                claimed.append(claims.claim(f"peak against prediction, {name}", figure(away), OFF, "lower", found))
            if name == "int8 moments":
                rate = found[name]["tokens_per_s"]
                claimed.append(claims.claim("tokens/s of 8B beside a reported 7B", rate, PUBLISHED, "higher", found))
    if context:
        claimed.append(claims.claim("context_gb", context["context_gb"], CONTEXT_BYTES / GIGA, "lower", context))
    return claimed


def whole() -> Config:
    """Return Llama 3 8B; tiny on a CPU."""
    return configs.recipes.llama3_8b() if CUDA else configs.recipes.tiny().override({"parallel.precision": "bf16"})


def before() -> dict[str, Any]:
    """Measure what is in use before the first tensor, and after the first product."""
    free, total = torch.cuda.mem_get_info()
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    one @ one
    torch.cuda.synchronize()
    left, _ = torch.cuda.mem_get_info()
    context = total - left - torch.cuda.memory_reserved()
    at_first = {"total_gb": figure(total / GIGA), "at_first_gb": figure((total - free) / GIGA)}
    return at_first | {"context_gb": figure(context / GIGA)}


def step(config: Config, name: str, quick: bool) -> dict[str, Any]:
    """Train it for some seconds. Raises NotHere if the device or the host has too little memory."""
    weights = sum(one.numel() for one in skeleton(config.model, VOCABULARY).parameters())
    if config.parallel.offloads_parameters and (needed := weights * ON_HOST) > (there := host_bytes()):
        raise NotHere(f"takes about {needed / GIGA:.0f} GB of the host's memory, and {there / GIGA:.0f} GB are free")
    rows = random_rows(1 if CUDA else 4, LENGTH, VOCABULARY)
    found = alternate(
        {name: Variant(config)}, rows, VOCABULARY, 1, 0.2 if quick else 4.0, config.optim.moments == "fp32"
    )
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGA
    return found | {"weights": weights, "host_gb": figure(host)}


def host_bytes() -> int:
    """Return the memory of the host that is free [bytes]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
