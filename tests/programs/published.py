# ruff: noqa: RUF001 - tokens of DeepSeek have wide bars
"""Chat templates of published models, from TRL's wheel, and a tokenizer with their special tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from springtide.corpus import open_tokenizer

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<|observation|>", "[gMASK]", "<sop>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"),
)
VOCABULARY = open_tokenizer("bytes", (), 0, special_tokens=SPECIAL)
ENDS = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507"), ("<|im_end|>",)),
    **dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "lfm2"), ("<|im_end|>",)),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), ("<|im_end|>",)),
    **dict.fromkeys(("phi3", "phi3_5"), ("<|end|>", "<|endoftext|>")),
    **dict.fromkeys(("gemma", "gemma3"), ("<end_of_turn>",)),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), ("<|eot_id|>",)),
    **dict.fromkeys(("deepseekv3", "deepseek_r1_distill"), ("<｜end▁of▁sentence｜>",)),
    "glm4moe": ("<|user|>",),
    "gptoss": ("<|return|>",),
}
"""Family -> the tokens that end an answer."""


def trl_template(name: str) -> str:
    """Return a template of TRL's wheel; skip if TRL is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
