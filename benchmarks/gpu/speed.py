"""Tokens/s, MFU and energy of springtide's step against a bare loop on the same model, at three sizes.

Ours is ``train_step`` on the model that ``parallelize`` lays out in a process group of one: FSDP2, fp32 master weights and
moments, agreement and verdict in every step. The bare loop has the same decoder, blocks compiled and recomputed alike, the same
head loss, bf16 weights beside fp32 masters, clipping and fused AdamW, and nothing else: no group, no agreement, no wait for the
device. Both train on random ids that lie on the device. Rounds alternate, who goes first changes. Beside each round stands the
bf16 matrix product of that minute, which MFU is divided by as well as by the data sheet.

The 8B shape is Llama 3 8B's blocks, head and embedding with as many layers as fit, and its 32 layers are extrapolated from two
depths: what 8B would take on one device that held it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import claims
import torch
from measure import (
    CUDA,
    DEVICE,
    NO_GPU,
    Book,
    Energy,
    NotHere,
    draw,
    figure,
    gemm_tflops,
    group_of_one,
    laid_out,
    median_ms,
    peak_gb,
    random_rows,
    sync,
    tidy,
)
from torch import nn

from springtide import config as configs
from springtide.config import Config
from springtide.dist import alone
from springtide.model import flops_per_token, skeleton
from springtide.parallel import parallelize
from springtide.training import train_step
from springtide.training.peak_flops import peak_flops

GOAL = 0.97
"""Of the bare loop's tokens/s."""
CLIP = 1.0
SMALL_DEPTH, WHOLE_DEPTH = 4, 32
ROOMY = 120e9
"""A device with more memory takes twelve layers of 8B's, one with less eight [bytes]."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    config: Config
    rows: int
    length: int
    vocab_size: int
    rounds: int = 2


def measure(book: Book) -> list[dict[str, Any]]:
    """The cells, and what they claim."""
    energy = Energy()
    print(f"energy: {energy.source}", flush=True)
    seconds = 0.2 if book.quick or not CUDA else 4.0
    book.cell("gemm/bf16", lambda: {"tflops": gemm_tflops()})
    book.cell("gemm/fp8", fp8_gemm, NO_GPU)
    found = {}
    for case in cases(book.quick):
        found[case.name] = book.cell(f"training/{case.name}", lambda case=case: compare(case, seconds, energy))
    book.cell("training/8B, 32 layers, extrapolated", lambda: whole_8b(found))
    missing = "" if importlib.util.find_spec("torchao") else "needs torchao"
    large = next((case for case in cases(book.quick) if case.name.startswith("8B")), None)
    for precision in ("fp8", "fp8_rowwise") if large is not None else ():
        eighth = dataclasses.replace(large, config=large.config.override({"parallel.precision": precision}))
        book.cell(f"training/{large.name}, {precision}", lambda one=eighth: compare(one, seconds, energy), missing)
    energy.close()
    measured = {name: values for name, values in found.items() if values}
    return [
        claims.claim(f"vs_bare_loop {name}", values["vs_bare_loop"], GOAL, "higher", values)
        for name, values in measured.items()
    ]


def cases(quick: bool) -> list[Case]:
    """Most valuable first."""
    if not CUDA:
        small = {"model.num_layers": 2, "model.max_sequence_length": 64, "parallel.precision": "bf16"}
        config = configs.recipes.tiny().override(small)
        return [Case("tiny", config, 4, 64, 256, 1 if quick else 2)]
    deep = 12 if torch.cuda.mem_get_info()[1] > ROOMY else 8
    llama = configs.recipes.llama3_8b()

    def layers(number: int, **changes: Any) -> Config:
        return llama.override({"model.num_layers": number, **changes})

    small, middle = configs.recipes.gpu_125m(), configs.recipes.gpu_1b()
    compiled = small.override({"parallel.compile": True})
    return [
        Case(f"8B's shape, {deep} layers", layers(deep), 1, 8192, 128256),
        Case("1.3B", middle, 8, 2048, 50304),
        Case("125M", small, 32, 1024, 50304, 3),
        Case(f"8B's shape, {SMALL_DEPTH} layers", layers(SMALL_DEPTH), 1, 8192, 128256),
        Case("125M, compiled", compiled, 32, 1024, 50304, 3),
        Case(f"8B's shape, {deep} layers, eager", layers(deep, **{"parallel.compile": False}), 1, 8192, 128256),
        Case(
            f"8B's shape, {deep} layers, all recomputed",
            layers(deep, **{"parallel.recompute": "full"}),
            1,
            8192,
            128256,
        ),
    ]


def compare(case: Case, seconds: float, energy: Energy) -> dict[str, Any]:
    """Alternating rounds of both."""
    if case.config.parallel.compile:
        torch.compiler.reset()  # else shapes of cases before count against the limit on compiling one function
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    joules: dict[str, list[float]] = {"ours": [], "bare": []}
    gemms, found = [], {}
    for number in range(case.rounds):
        for who in ("ours", "bare") if number % 2 == 0 else ("bare", "ours"):
            gemms.append(gemm_tflops(0.2))
            tidy()
            first_s, rate, used = (_ours if who == "ours" else _bare)(case, seconds, energy)
            rates[who].append(rate)
            if used is not None:
                joules[who].append(used)
            prefix = "" if who == "ours" else "bare_"
            found[f"{prefix}peak_gb"] = peak_gb()
            found.setdefault(f"{prefix}first_step_s", round(first_s, 2))
            tidy()
    tokens_per_s = {who: statistics.median(of) for who, of in rates.items()}
    ratios = [ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True)]
    flops = flops_per_token(skeleton(case.config.model, case.vocab_size, None), case.length)
    peak, source = peak_flops(DEVICE)
    gemm = statistics.median(gemms) * 1e12
    figures = {
        "tokens_per_s": round(tokens_per_s["ours"], 1),
        "bare_tokens_per_s": round(tokens_per_s["bare"], 1),
        "vs_bare_loop": round(statistics.median(ratios), 4),
        "vs_bare_loop_least": round(min(ratios), 4),
        "vs_bare_loop_most": round(max(ratios), 4),
        "step_s": figure(case.rows * case.length / tokens_per_s["ours"]),
        "mfu_of_gemm": figure(flops * tokens_per_s["ours"] / gemm),
        "mfu_of_data_sheet": figure(flops * tokens_per_s["ours"] / peak),
        "gemm_tflops": figure(gemm / 1e12),
        "gflops_per_token": figure(flops / 1e9),
    }
    for who, of in joules.items():
        if of:
            figures[f"{'' if who == 'ours' else 'bare_'}joules_per_million_tokens"] = round(statistics.median(of), 1)
    return figures | found | {"rows": case.rows, "length": case.length, "peak_source": source, "energy": energy.source}


def _ours(case: Case, seconds: float, energy: Energy) -> tuple[float, float, float | None]:
    """Seconds of the first step, tokens/s, joules a million tokens."""
    with group_of_one() as here:
        model, optimizer = laid_out(case.config, here, case.vocab_size)
        rows, whole = random_rows(case.rows, case.length, case.vocab_size), [slice(0, case.rows)]
        tokens = case.rows * case.length

        def step() -> None:
            train_step(model, optimizer, rows, 0, here, micro_batches=whole, tokens_per_step=tokens, clip_norm=CLIP)

        return _burst(step, tokens, seconds, energy)


def _bare(case: Case, seconds: float, energy: Energy) -> tuple[float, float, float | None]:
    """The same of the loop one would write by hand."""
    layout = case.config.parallel.model_copy(update={"precision": "fp32", "reduction": "fp32"})
    model = parallelize(skeleton(case.config.model, case.vocab_size, None), layout, alone(DEVICE))
    draw(model)
    weights = list(model.parameters())
    masters = [weight.detach().clone() for weight in weights]
    model.to(torch.bfloat16)
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=case.config.optim.peak_lr, betas=case.config.optim.betas, fused=True)
    rows = random_rows(case.rows, case.length, case.vocab_size)
    tokens_BL, targets_BL = rows[:, :-1], rows[:, 1:].contiguous()
    gradients: list[Any] = [master.grad for master in masters]

    def step() -> None:
        total, _ = model(tokens_BL, targets_BL)
        (total / targets_BL.numel()).backward()
        torch._foreach_copy_(gradients, [weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([weight.data for weight in weights], masters)

    return _burst(step, case.rows * case.length, seconds, energy)


def _burst(step: Callable[[], None], tokens: int, seconds: float, energy: Energy) -> tuple[float, float, float | None]:
    """Three steps to warm up, then as many as take about so many seconds, waited for together."""
    begin = time.perf_counter()
    step()
    sync()
    first_s = time.perf_counter() - begin
    for _ in range(2):
        step()
    sync()
    begin = time.perf_counter()
    step()
    sync()
    times = max(3, round(seconds / (time.perf_counter() - begin)))
    before, begin = energy.joules(), time.perf_counter()
    for _ in range(times):
        step()
    sync()
    took, after = time.perf_counter() - begin, energy.joules()
    used = (after - before) / (times * tokens) * 1e6 if before is not None and after is not None else None
    return first_s, times * tokens / took, used


def whole_8b(found: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """A step of all layers: that of the deeper stack, and what a layer more takes, as often as layers are missing."""
    steps = {}
    for name, values in found.items():
        words = name.split()
        if values and name.startswith("8B's shape") and name.endswith(" layers"):
            steps[int(words[2])] = values
    if len(steps) < 2:
        raise NotHere("needs two depths of 8B's shape" if CUDA else "needs a GPU")
    shallow, deep = sorted(steps)
    layer_s = (steps[deep]["step_s"] - steps[shallow]["step_s"]) / (deep - shallow)
    step_s = steps[deep]["step_s"] + layer_s * (WHOLE_DEPTH - deep)
    tokens = steps[deep]["rows"] * steps[deep]["length"]
    flops = flops_per_token(skeleton(configs.recipes.llama3_8b().model, 128256, None), steps[deep]["length"])
    rate = tokens / step_s
    gemm = steps[deep]["gemm_tflops"]
    return {
        "tokens_per_s": round(rate, 1),
        "step_s": round(step_s, 4),
        "layer_s": round(layer_s, 5),
        "mfu_of_gemm": round(flops * rate / gemm / 1e12, 4),
        "from_layers": f"{shallow} and {deep}",
    }


def fp8_gemm() -> dict[str, Any]:
    """What the matrix units do in fp8 with one scale a tensor: the ceiling of ``parallel.precision: fp8``."""
    if not hasattr(torch, "_scaled_mm") or torch.cuda.get_device_capability() < (8, 9):
        raise NotHere("this torch or this device multiplies no fp8")
    size = 8192
    a, b = (torch.randn(size, size, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    found = median_ms(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    return {"tflops": round(2 * size**3 / found / 1e9, 1)}
