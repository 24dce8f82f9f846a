"""Chats in a row: where each begins, and what it attends to, also if the end of a turn is the end of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import their_model
from prepared import prepare, small
from published import VOCABULARY, trl_template

from springtide.config import Config
from springtide.dataset import open_dataset
from springtide.errors import ConfigError, SpringtideError
from springtide.hf import open_model, read_weights
from springtide.model import whole
from springtide.shards import TRAIN, SplitReader, ids_of, load_manifest
from springtide.storage import Folder
from springtide.stream import open_data

pytestmark = pytest.mark.processes

LENGTH = 640
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Each turn ends with the end of a text."""


def chats(turns: int = 2) -> list[list[dict[str, str]]]:
    return [
        [
            message
            for turn in range(turns)
            for message in (
                {"role": "user", "content": f"What is {number} + {turn}?"},
                {"role": "assistant", "content": f"It is {number + turn}."},
            )
        ]
        for number in range(120)
    ]


def chat_config(root: Path, template: str, end: str, records: list[dict[str, Any]], **changes: Any) -> Config:
    """A dataset of chats, prepared with the tokenizer of ``published``."""
    (root / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "mine.jinja").write_text(template)
    (root / "tokenizer.json").write_text(VOCABULARY.to_json())
    given = {"corpus__chat_template": str(root / "mine.jinja"), "corpus__tokenizer": str(root / "tokenizer.json")}
    given |= {"corpus__end_of_text": end, "shards__sequence_length": LENGTH, "shards__packing": "best_fit"}
    given |= {"shards__mask_across_documents": True, "model__max_sequence_length": LENGTH, **changes}
    return prepare(small(root / "made", root / "chats.jsonl", **given))


def as_transformers(template: str, chat: list[dict[str, str]], end: str) -> list[int]:
    """The ids of a chat as transformers lays it out."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=VOCABULARY.tokenizer, eos_token=end)
    tokenizer.chat_template = template
    return list(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])


@pytest.mark.parametrize(
    ("template", "end"), [("qwen2_5", "<|im_end|>"), ("qwen2_5", "<|endoftext|>"), (ZEPHYR, "</s>")]
)
def test_chats_in_a_row_are_read_as_transformers_reads_them_alone(template: str, end: str, tmp_path: Path) -> None:
    """Ids, positions and logits of several chats in a row, of several turns, are those of transformers for each alone, whether
    or not the end of a turn ends texts. The token between two chats changes none of them."""
    text = trl_template(template) if "{" not in template else template
    config = chat_config(tmp_path, text, end, [{"messages": chat} for chat in chats()])
    manifest = load_manifest(Folder(config.shards.dataset))
    assert manifest.whole_documents
    theirs = their_model("qwen2")
    theirs.resize_token_embeddings(VOCABULARY.size)
    theirs.save_pretrained(tmp_path / "model")
    found = open_model(Folder(str(tmp_path / "model")))
    settings = found.model.model_copy(update={"max_sequence_length": LENGTH})
    model = whole(settings, VOCABULARY.size, *manifest.document_ids)
    with torch.no_grad():
        for name, tensor in read_weights(found):
            dict(model.named_parameters())[name].copy_(tensor)
    [row] = SplitReader(Folder(config.shards.dataset), manifest, TRAIN).read(np.arange(1)).tokens
    ids = torch.from_numpy(ids_of(row).astype(np.int64))[None, :LENGTH]
    expected = {tuple(as_transformers(text, chat, end)) for chat in chats()}
    with torch.no_grad():
        logits = model(ids)[0]
        at = held = 0
        for begin in range(LENGTH):
            for one in expected:
                if begin >= at and tuple(ids[0, begin : begin + len(one)].tolist()) == one:
                    alone = theirs(torch.tensor([one])).logits[0]
                    ours = logits[begin : begin + len(one), : VOCABULARY.size]
                    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)
                    held, at = held + 1, begin + len(one)
    assert held >= 2


def test_pairs_of_a_model_whose_turns_end_texts_are_told_apart(tmp_path: Path) -> None:
    """In each pair the first document is the chosen one, also where answers before it end with the end of a text."""
    from springtide.model.objective import by_pair

    asked = chats()
    records = [{"prompt": one[:3], "chosen": "Right.", "rejected": "Xrong!!"} for one in asked]
    config = chat_config(tmp_path, ZEPHYR, "</s>", records)
    data = open_data(config.data)
    folder = Folder(config.shards.dataset)
    tokens = SplitReader(folder, load_manifest(folder), TRAIN).read(np.arange(1)).tokens
    ids = torch.from_numpy(ids_of(tokens).astype(np.int64))
    rows, targets = ids[:, :-1], ids[:, 1:]
    eos_id, bos_id, are_whole = data.document_ids
    assert eos_id is not None
    assert bos_id is not None
    spelled = torch.tensor([[VOCABULARY.decode([int(one)]) in ("R", "X") for one in row] for row in targets])
    labels = torch.where(spelled, targets, -100)
    found = by_pair(labels.clamp_min(0).float(), rows, labels, eos_id, bos_id, are_whole)
    seen = {
        (int(one), int(other)) for one, other in zip(found.chosen[0], found.rejected[0], strict=True) if one or other
    }
    assert seen == {(VOCABULARY.id_of("R", ""), VOCABULARY.id_of("X", ""))}


def test_chats_among_texts_may_not_hold_the_end_of_a_text(tmp_path: Path) -> None:
    """Texts may be cut, so there the end of a text ends a document wherever it stands."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"Text {one}. " * 20}) + "\n" for one in range(90))
    )
    sources = {"chats": {"source": str(tmp_path / "chats.jsonl"), "chat_template": str(tmp_path / "mine.jinja")}}
    sources["texts"] = {"source": str(tmp_path / "texts.jsonl"), "chat_template": ""}
    with pytest.raises(SpringtideError, match="ends a document, before the end of the chat"):
        chat_config(
            tmp_path,
            ZEPHYR,
            "</s>",
            [{"messages": chat} for chat in chats()],
            corpus__sources=sources,
            corpus__source="",
        )


def test_a_template_that_seems_to_hold_two_documents_is_refused(tmp_path: Path) -> None:
    doubled = ZEPHYR.replace("+ eos_token", "+ eos_token + eos_token")
    with pytest.raises(ConfigError, match="as between two documents"):
        chat_config(tmp_path, doubled, "</s>", [{"messages": chat} for chat in chats()])


def test_texts_keep_the_format_of_their_manifest(tmp_path: Path) -> None:
    """A version that knows no whole documents reads new datasets of texts."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"Text {one}. " * 20}) + "\n" for one in range(90))
    )
    config = prepare(small(tmp_path / "made", tmp_path / "texts.jsonl"))
    stored = json.loads(Folder(config.shards.dataset).read("manifest.json"))
    assert stored["format"] == 9
    assert "whole_documents" not in stored
    assert not open_dataset(config.shards.dataset)[0].whole_documents
