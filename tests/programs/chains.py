"""A model whose next token is a function of the last one: what it writes is known without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from springtide.corpus import Tokenizer
from springtide.shards import CHAT_TEMPLATE, TOKENIZER


def write_chain(
    folder: Path, vocabulary: Tokenizer, after: Mapping[int, int], otherwise: int, template: str, **settings: object
) -> None:
    """Write a folder of transformers with a Llama model.

    Args:
        folder: to create.
        vocabulary: its tokenizer.
        after: token id -> the likeliest next one.
        otherwise: the likeliest next one after all others.
        template: its chat template.
        settings: of config.json, such as ``eos_token_id``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    size = vocabulary.size
    width = -(-size // 8) * 8
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 8}
    shape |= {"vocab_size": size, "hidden_size": width, "max_position_embeddings": 1024}
    config = LlamaConfig(
        **{**shape, "tie_word_embeddings": False, "bos_token_id": None, "pad_token_id": None, **settings}
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        for last in range(size):
            model.lm_head.weight[after.get(last, otherwise), last] = 1.0
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    (folder / TOKENIZER).write_text(vocabulary.to_json())
    (folder / CHAT_TEMPLATE).write_text(template)
