"""Tokenizers go out in GGUF files, and who reads them makes the same ids; what llama.cpp cannot be told is refused."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from springtide.corpus.tokenizer import PATTERNS, Tokenizer, byte_tokenizer, train_bpe
from springtide.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[3] / "examples/gguf"))
from gguf_tokenizer import tokenizer_metadata  # noqa: E402
from to_gguf import Writer, _add  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.processes]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = 10_000
POOLS = (
    "etaoinshrdlu",
    "ETAOINSHRDLU",
    "0123456789",
    " ",
    " \t\n\r\u00a0\u3000",
    ".,;:!?'\"()[]{}<>|/\\-_=+*&^%$#@~`",
    "áßçøñüÉÎ",
    "привет мир",
    "世界你好日本語",
    "한국어",
    "مرحبا",
    "हिन्दी",
    "🚀😶🌫️🦙✅",
    "\u0301\u200d\u202e\ufeff\x00\x7f\u00ad",
    "²³½Ⅷ٣",
)
WORDS = (
    "'s",
    "'RE",
    "don't",
    "\n\n",
    "   ",
    "<|im_end|>",
    "<|endoftext|>",
    "[PAD5]",
    "def f(x):\n    return x\n",
    "3.14",
)


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of letters, digits, spaces, marks and special tokens of many scripts."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(0, 12)):
            pool = rng.choice(POOLS)
            parts.append(rng.choice(WORDS) if rng.random() < 0.2 else "".join(rng.choices(pool, k=rng.randint(1, 6))))
            if rng.random() < 0.3:
                parts.append(" ")
        yield "".join(parts)


def trained(pattern: str) -> Tokenizer:
    return train_bpe(texts(2000, seed=1), 600, pattern, SPECIAL)


class Told(NamedTuple):
    """What an ``ImportedModel`` says of its tokenizer."""

    tokenizer: str
    eos_id: int | None
    bos_id: int | None = None
    template: str = ""


def told_of(tokenizer: Tokenizer, **changes: Any) -> Told:
    return Told(json.dumps({**json.loads(tokenizer.to_json()), **changes}), tokenizer.end_of_text)


def read_back(folder: Path, told: Told, rows: int = 640) -> tuple[Any, dict[str, Any], list[str]]:
    """The tokenizer that transformers finds in a file, its metadata and the remarks."""
    metadata, remarks = tokenizer_metadata(told, rows)
    folder.mkdir(exist_ok=True)
    writer = Writer(folder / "model.gguf", "llama")
    _add(writer, metadata)
    writer.add_tensor("token_embd.weight", np.zeros((1, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf"), dict(metadata), remarks


def same(found: Any, expected: Tokenizer, all_texts: list[str]) -> None:
    expected.tokenizer.encode_special_tokens = False
    for text in all_texts:
        assert found(text)["input_ids"] == expected.tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("pattern", "name"), [("gpt2", "gpt-2"), ("llama3", "dbrx"), ("qwen", "qwen2"), ("gpt4", "dbrx")]
)
def test_transformers_makes_the_same_ids_of_a_file(pattern: str, name: str, tmp_path: Path) -> None:
    tokenizer = trained(pattern)
    found, metadata, remarks = read_back(tmp_path, told_of(tokenizer))
    assert metadata["tokenizer.ggml.pre"] == name
    all_texts = list(texts(TEXTS))
    if pattern == "gpt4":  # it makes one word of the spaces that end a text
        assert "line of spaces" in remarks[0]
        all_texts = [text.rstrip() for text in all_texts]
    else:
        assert remarks == []
    same(found, tokenizer, all_texts)
    assert found.eos_token == "<|endoftext|>"
    assert len(metadata["tokenizer.ggml.tokens"]) == len(set(metadata["tokenizer.ggml.tokens"])) == 640
    assert found.decode(found("Hi 世界 🚀")["input_ids"]) == "Hi 世界 🚀"


def test_bytes_and_their_chats_go_out(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SPECIAL)
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    found, metadata, _ = read_back(tmp_path, told_of(tokenizer)._replace(template=template), 300)
    assert metadata["tokenizer.ggml.merges"] == []
    same(found, tokenizer, list(texts(200)))
    chat = [{"role": "user", "content": "Hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_the_token_that_begins_a_text_is_told(tmp_path: Path) -> None:
    tokenizer = trained("llama3")
    begin = tokenizer.id_of("<|im_start|>", "begin")
    steps = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<|im_start|>": {"id": "<|im_start|>", "ids": [begin], "tokens": ["<|im_start|>"]}}
    post = {"type": "TemplateProcessing", "single": steps, "pair": steps, "special_tokens": tokens}
    told = told_of(tokenizer, post_processor=post)
    found, metadata, _ = read_back(tmp_path, told)
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]) == (begin, True)
    assert found("Hi")["input_ids"][0] == begin
    post["single"] = [*steps, steps[0]]
    with pytest.raises(ConfigError, match="post_processor"):
        tokenizer_metadata(told_of(tokenizer, post_processor=post), 640)


def test_words_that_are_tokens_need_a_reader_that_finds_them() -> None:
    spec = json.loads(trained("gpt2").to_json())
    spec["model"]["ignore_merges"] = True
    with pytest.raises(ConfigError, match=r"model\.ignore_merges = True: .*llama\.cpp"):
        tokenizer_metadata(Told(json.dumps(spec), 0), 640)
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS["llama3"]
    assert tokenizer_metadata(Told(json.dumps(spec), 0), 640)[0]["tokenizer.ggml.pre"] == "llama-bpe"


def test_what_llama_cpp_cannot_be_told_is_refused() -> None:
    tokenizer = trained("llama3")
    spec = json.loads(tokenizer.to_json())
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    odd = dict(spec["added_tokens"][0], rstrip=True)
    for changes, problem in (
        ({"model": {**spec["model"], "byte_fallback": True}}, "model.byte_fallback"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0], ["a", -1.0]]}}, "model.type"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"pre_tokenizer": bytes_only}, "pre_tokenizer"),
        ({"pre_tokenizer": {**bytes_only, "add_prefix_space": True, "use_regex": True}}, "add_prefix_space"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        ({"added_tokens": [odd, *spec["added_tokens"][1:]]}, "added_tokens"),
    ):
        with pytest.raises(ConfigError, match=rf"tokenizer\.json: .*{problem}.*llama\.cpp.*convert_hf_to_gguf"):
            tokenizer_metadata(told_of(tokenizer, **changes), 640)
    with pytest.raises(ConfigError, match="pre_tokenizer"):
        tokenizer_metadata(told_of(trained("gpt4o")), 640)
    with pytest.raises(ConfigError, match="500 rows"):
        tokenizer_metadata(told_of(tokenizer), 500)
    with pytest.raises(ConfigError, match=r"eos_token_id = None"):
        tokenizer_metadata(told_of(tokenizer)._replace(eos_id=None), 640)
    composing = told_of(tokenizer, normalizer={"type": "NFC"})
    assert "compose" in tokenizer_metadata(composing, 640)[1][0]
    assert tokenizer_metadata(Told("", None), 640)[0] == {"tokenizer.ggml.model": "none"}
