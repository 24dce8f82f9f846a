"""LoRA of 8B's shape against transformers with PEFT: tokens/s and peak memory, rounds alternating.

Both train adapters of rank 16 on all matrices of 12 layers, over a base in bf16 with random weights, on the same random rows.
Ours is springtide's step as the recipe ``lora`` has it, compiled. The peer is what PEFT's guides show: LlamaForCausalLM with
scaled_dot_product_attention and gradient checkpointing, fused AdamW, one backward, clipping, not compiled.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import claims
import torch
from measure import (
    CLIP,
    CUDA,
    DEVICE,
    Book,
    Variant,
    check_memory,
    figure,
    peak_gb,
    random_rows,
    seconds_of_one,
    tidy,
    training,
)
from torch import Tensor

from springtide import config as configs
from springtide.config import Config

LAYERS, VOCABULARY, LENGTH = (12, 128256, 8192) if CUDA else (2, 256, 64)
RANK, ALPHA = 16, 32.0
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Of a block, as transformers calls them."""


def measure(book: Book) -> list[dict[str, Any]]:
    """Measure the cell; return its claims."""
    lacking = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    missing = f"needs {' and '.join(lacking)} (pip install)" if lacking else ""
    name = f"8B's shape, {LAYERS} layers" if CUDA else "tiny"
    rounds, seconds = (1, 0.2) if book.quick else (2, 3.0)
    found = book.cell(name, lambda: compare(rounds, seconds), missing)
    if not found:
        return []
    ratio = found["ours"]["tokens_per_s"] / found["peft"]["tokens_per_s"]
    claimed = [claims.claim("tokens/s of ours over PEFT's", ratio, 1.0, "higher", found)]
    if CUDA:
        memory = found["ours"]["peak_gb"] / found["peft"]["peak_gb"]
        claimed.append(claims.claim("peak memory of ours over PEFT's", memory, 0.8, "lower", found))
    return claimed


def compare(rounds: int, seconds: float) -> dict[str, Any]:
    """Measure both in turn."""
    config, rows = config_of(), random_rows(1 if CUDA else 4, LENGTH, VOCABULARY)
    rates: dict[str, list[float]] = {"ours": [], "peft": []}
    found: dict[str, Any] = {"ours": check_memory(config, VOCABULARY, len(rows), LENGTH), "peft": {}}
    for number in range(rounds):
        for name in ("ours", "peft")[:: -1 if number % 2 else 1]:
            tidy()
            if name == "ours":
                with training(Variant(config), VOCABULARY) as step:
                    took = seconds_of_one(lambda step=step: step(rows), seconds)  # type: ignore[misc]
            else:
                peer = peft_step(config)
                took = seconds_of_one(lambda peer=peer: peer(rows), seconds)  # type: ignore[misc]
                del peer
            rates[name].append(rows[:, 1:].numel() / took)
            found[name]["peak_gb"] = peak_gb()
            tidy()
    for name, of in rates.items():
        rate = statistics.median(of)
        found[name] |= {"tokens_per_s": round(rate, 1), "spread": figure(max(of) / min(of))}
    return found


def config_of() -> Config:
    """Return the config of ours."""
    adapter = {"model.adapter": "lora", "model.adapter_rank": RANK, "model.adapter_alpha": ALPHA}
    adapter |= {"model.base_precision": "bf16", "parallel.precision": "bf16"}
    if CUDA:
        return configs.recipes.llama3_8b().override(
            adapter | {"model.num_layers": LAYERS, "parallel.recompute": "full"}
        )
    return configs.recipes.tiny().override(adapter)


def peft_step(config: Config) -> Callable[[Tensor], None]:
    """Return the step that one writes with PEFT, for the same model."""
    import peft
    import transformers

    model = config.model
    llama = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_sequence_length,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tied_head,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(DEVICE):
        base = transformers.AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MATRICES, lora_dropout=0.0, task_type="CAUSAL_LM")
    found = peft.get_peft_model(base, lora).to(DEVICE).train()
    if config.parallel.recompute != "none":
        found.enable_input_require_grads()
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [one for one in found.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.optim.peak_lr, fused=True)

    def step(rows: Tensor) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = found(input_ids=rows[:, :-1], labels=rows[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
