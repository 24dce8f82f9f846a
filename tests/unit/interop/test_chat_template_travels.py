"""The template of a dataset of chats goes out with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prepared import prepare, small
from saving import meta

from springtide.interop.hf_tokenizer import tokenizer_files
from springtide.shards import CHAT_TEMPLATE, TOKENIZER
from springtide.store import Folder, digest

transformers = pytest.importorskip("transformers")


def test_transformers_lays_out_a_chat_as_it_was_trained_on(tmp_path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"Hello {number}, 世界?"},
            {"role": "assistant", "content": f"Good evening {number}."},
        ]
        for number in range(300)
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    changes = {"corpus__chat_template": "chatml", "shards__sequence_length": 400, "shards__packing": "best_fit"}
    config = prepare(small(tmp_path / "made", source, **changes, shards__mask_across_documents=True))
    dataset = Folder(config.shards.dataset)
    known = meta(1).model_copy(update={"tokenizer_digest": digest.of_bytes(dataset.read(TOKENIZER))})
    found, remarks = tokenizer_files(known, [dataset], 512, 64)
    assert remarks == []
    out = tmp_path / "out"
    out.mkdir()
    for name, text in found.files.items():
        (out / name).write_text(text)
    assert CHAT_TEMPLATE in found.files
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    assert tokenizer.apply_chat_template(chats[7], tokenize=False) == (
        "<|im_start|>user\nHello 7, 世界?<|im_end|>\n<|im_start|>assistant\nGood evening 7.<|im_end|>\n"
    )
