"""Datasets of pairs of answers: each pair is whole in one row, the chosen answer first, and bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import prepare, small

from springtide.corpus.chats import EQUAL, NO_ROLE, NO_TEXT, ONE_SIDED, UNLIKE, BadChat, pair_of
from springtide.dataset import open_dataset
from springtide.errors import CorpusError
from springtide.shards import HELDOUT, TRAIN, SplitReader, ids_of, is_predicted
from springtide.storage import Folder

pytestmark = pytest.mark.processes

PACKED: dict[str, Any] = {
    "corpus__tokenizer": "bytes",
    "corpus__chat_template": "chatml",
    "shards__sequence_length": 300,
    "shards__packing": "best_fit",
    "shards__mask_across_documents": True,
}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_each_pair_is_whole_in_one_row_chosen_first(tmp_path: Path) -> None:
    """Each pair is whole in one row and the chosen answer comes first."""
    pairs = [{"prompt": f"Is {n} odd?", "chosen": "yes" * (n % 5 + 1), "rejected": f"no{n}"} for n in range(90)]
    equal = {"prompt": "?", "chosen": "same", "rejected": "same"}
    too_long = {"prompt": "?", "chosen": "long" * 80, "rejected": "short"}
    source = write(tmp_path / "pairs.jsonl", [*pairs, equal, {**equal, "chosen": " "}, too_long])
    url = prepare(small(tmp_path / "data", source, **PACKED)).shards.dataset
    manifest, vocabulary = open_dataset(url)
    assert manifest.holds_pairs
    dropped = manifest.source["dropped"]
    assert (dropped[EQUAL], dropped[ONE_SIDED], dropped["chat longer than a row"]) == (1, 1, 1)
    found = []
    for split in (TRAIN, HELDOUT):
        tokens = SplitReader(Folder(url), manifest, split).read(np.arange(manifest.splits[split].rows)).tokens
        for row in tokens:
            spelled = vocabulary.tokenizer.decode(ids_of(row).tolist(), skip_special_tokens=False)
            chats = [chat for chat in spelled.split("<|endoftext|>") if chat]
            assert len(chats) % 2 == 0
            found += [(chosen, rejected) for chosen, rejected in zip(chats[::2], chats[1::2], strict=True)]
            answers = vocabulary.tokenizer.decode(ids_of(row[is_predicted(row)]).tolist(), skip_special_tokens=False)
            assert answers.count("<|im_end|>") == len(chats)
    layout = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    expected = [tuple(layout.format(one["prompt"], one[name]) for name in ("chosen", "rejected")) for one in pairs]
    assert sorted(found) == sorted(expected)


def test_a_bad_pair_is_counted_and_named_with_its_line(tmp_path: Path) -> None:
    good = [{"prompt": f"{number} + 2?", "chosen": f"{number + 2}", "rejected": "5"} for number in range(60, 120)]
    bad = {
        "rejected is missing": {"prompt": "2 + 2?", "chosen": "4"},
        "rejected is a int, not a text": {**good[0], "rejected": 5},
        "chosen: message 0: role = 'robot' is not one of": {**good[0], "chosen": [{"role": "robot", "content": "4"}]},
        "rejected does not begin with its prompt": {
            **good[0],
            "rejected": [{"role": "user", "content": "3?"}, *_answer("5")],
        },
        "chosen and rejected have other turns before their last answers": {
            "chosen": _answer("4"),
            "rejected": _answer("5"),
        },
    }
    source = write(tmp_path / "bad.jsonl", [*bad.values(), *good])
    found = open_dataset(prepare(small(tmp_path / "data", source, **PACKED)).shards.dataset)[0].source
    assert {reason: found["dropped"][reason] for reason in (NO_ROLE, NO_TEXT, UNLIKE)} == {
        NO_ROLE: 1,
        NO_TEXT: 2,
        UNLIKE: 2,
    }
    assert [one["sample"].startswith(problem) for one, problem in zip(found["broken"], bad, strict=True)] == [True] * 5
    assert found["broken"][1]["name"] == f"{source}, line 2"


def test_pairs_and_chats_make_a_dataset_each(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{number}?", "chosen": "4", "rejected": "5"} for number in range(60)]
    source = write(tmp_path / "mixed.jsonl", [*pairs, {"prompt": "2 + 2?", "completion": "4"}])
    with pytest.raises(CorpusError, match=r"60 pairs .* 1 "):
        prepare(small(tmp_path / "data", source, **PACKED))


def _answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_messages_and_texts_are_the_same_pair() -> None:
    asked = [{"role": "user", "content": "2 + 2?"}]
    texts = pair_of({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    assert pair_of({"prompt": asked, "chosen": _answer("4"), "rejected": _answer("5")}) == texts
    assert pair_of({"chosen": asked + _answer("4"), "rejected": asked + _answer("5")}) == texts
    assert pair_of({"prompt": "2 + 2?", "chosen": asked + _answer("4"), "rejected": asked + _answer("5")}) == texts
    with pytest.raises(BadChat, match=r"chosen: message 0 .*str"):
        pair_of({"prompt": asked, "chosen": ["4"], "rejected": "5"})
