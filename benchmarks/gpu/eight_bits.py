"""fp8 against bf16 in springtide's step: tokens/s at 8B's shape, and the loss of 125M on text.

The stage ``fp8`` has one scale a tensor, ``fp8_rowwise`` one a row or column. Rounds alternate between the two precisions. The
8B shape is Llama 3 8B's blocks, head and embedding with 12 layers. The losses are those of two models that begin with the same
weights and see the same 60 batches of Python's own source, as bytes.
"""

from __future__ import annotations

import importlib.util
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import claims
import torch
from measure import CUDA, DEVICE, NO_GPU, Book, NotHere, Variant, alternate, random_rows, seconds_of_one, sync, training

from springtide import config as configs
from springtide.config import Config

LAYERS, VOCABULARY, LENGTH = (12, 128256, 8192) if CUDA else (2, 256, 64)
STEPS, LAST = 60, 20
"""Steps of the losses, and those at the end whose mean is compared."""
MFU_GOAL, RATIO_GOAL, LOSS_GOAL = 0.50, 1.25, 0.02
BYTES = 256
FEW_BYTES = 2**20


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cells; return their claims."""
    precision, shape = book.stage, f"8B's shape, {LAYERS} layers" if CUDA else "tiny"
    missing = NO_GPU or ("" if importlib.util.find_spec("torchao") else "needs torchao (benchmarks/gpu/wheels.py)")
    book.cell("products", products, missing)
    bf16 = large_config()
    variants = {"bf16": Variant(bf16)}
    if not missing:
        variants[precision] = Variant(bf16.override({"parallel.precision": precision}))
    name = f"{shape}: {' against '.join(variants)}"
    rows = random_rows(1 if CUDA else 4, LENGTH, VOCABULARY)
    seconds = 0.2 if book.quick else 4.0
    found = book.cell(name, lambda: alternate(variants, rows, VOCABULARY, 1 if book.quick else 2, seconds))
    steps = 6 if book.quick else STEPS
    losses = book.cell(f"125M: {steps} losses", lambda: compared(precision, steps), missing, is_timed=False)
    claimed = []
    if found and CUDA:
        claimed.append(claims.claim(f"mfu of {shape}, bf16", found["bf16"]["mfu"], MFU_GOAL, "higher", found))
    if found and precision in found:
        ratio = found[precision]["tokens_per_s"] / found["bf16"]["tokens_per_s"]
        claimed.append(claims.claim(f"{precision} over bf16", ratio, RATIO_GOAL, "higher", found))
    if losses:
        claimed.append(
            claims.claim(f"loss of {precision} less bf16's", losses["differs_by"], LOSS_GOAL, "lower", losses)
        )
    return claimed


def large_config() -> Config:
    """Return 8B's shape of some layers, in bf16; tiny on a CPU."""
    if CUDA:
        return configs.recipes.llama3_8b().override({"model.num_layers": LAYERS})
    return configs.recipes.tiny().override({"parallel.precision": "bf16"})


def products() -> dict[str, Any]:
    """Measure matrix products of 8192^3 in both: the ceiling of what fp8 can win in a step."""
    if torch.cuda.get_device_capability() < (8, 9):
        raise NotHere("this device multiplies no fp8")
    size, found = 8192, {}
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    found["bf16_tflops"] = round(2 * size**3 / seconds_of_one(lambda: a @ b, 0.3) / 1e12, 1)
    c, d, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    took = seconds_of_one(
        lambda: torch._scaled_mm(c, d.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True), 0.3
    )
    return found | {"fp8_tflops": round(2 * size**3 / took / 1e12, 1)}


def compared(precision: str, steps: int) -> dict[str, Any]:
    """Train 125M on the same batches in both precisions."""
    small = {"parallel.compile": True, "optim.peak_lr": 3e-4}
    config, rows = configs.recipes.gpu_125m().override(small), 32
    batches = text(steps, rows, config.shards.sequence_length)
    losses = {}
    for name in ("bf16", precision):
        with training(Variant(config.override({"parallel.precision": name})), BYTES) as step:
            losses[name] = [step(batch.to(DEVICE)) for batch in batches]
            sync()
    last = min(LAST, steps // 2)
    means = {name: statistics.fmean(of[-last:]) for name, of in losses.items()}
    largest = max(abs(one - other) for one, other in zip(losses["bf16"], losses[precision], strict=True))
    return {
        "bf16_loss": round(means["bf16"], 4),
        f"{precision}_loss": round(means[precision], 4),
        "differs_by": round(means[precision] - means["bf16"], 4),
        "differs_most_by": round(largest, 4),
        "of_last_steps": last,
        "losses": losses,
    }


def text(steps: int, rows: int, length: int) -> list[torch.Tensor]:
    """Return so many batches of Python's own source as bytes, int64 (rows, length + 1) each."""
    wanted, found = steps * rows * (length + 1), bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= wanted:
            break
    if len(found) < min(wanted, FEW_BYTES):
        raise NotHere("Python's own source is not on this machine")
    found = (found * -(-wanted // len(found)))[:wanted]
    whole = torch.frombuffer(bytearray(found), dtype=torch.uint8).long()
    return list(whole.view(steps, rows, length + 1))
