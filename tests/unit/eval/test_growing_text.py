"""The text of a row while it is written: what is decoded once is that of all ids, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from springtide.corpus import Tokenizer
from springtide.corpus.tokenizer import byte_tokenizer
from springtide.eval.text_model import GrowingText


def byte_fallback() -> Tokenizer:
    """As Llama 2's: a space before each text, which its first id loses; a run of bytes is text as a whole, or not at all."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {piece: number for number, piece in enumerate(["\u2581", "\u2581a", "b", "\u00fc"], start=256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["</s>"])
    return Tokenizer(tokenizer)


LEVEL, FALLBACK = byte_tokenizer(), byte_fallback()
WORDS = ["tide ", "\u00fcber ", "\u6f6e\u6c50", " ", "\U0001f30a", "b", "\n"]


def level_ids(text: str) -> list[int]:
    [ids] = LEVEL.encode([text])
    return list(ids[:-1].tolist())


def fallback_ids(text: str) -> list[int]:
    ids = {" b": [256, 258], " ": [256], "b": [258]}
    return [one for letter in text for one in ids.get(letter, list(letter.encode()))]


def kinds() -> Iterable[Any]:
    draw = random.Random(1)
    words = "".join(draw.choices(WORDS, k=150))
    yield pytest.param(LEVEL, level_ids(words), id="bytes")
    yield pytest.param(LEVEL, [draw.randrange(257) for _ in range(600)], id="any bytes")
    yield pytest.param(LEVEL, level_ids(words)[:40] + [97] * 700 + level_ids(words), id="bytes that are no text")
    yield pytest.param(LEVEL, level_ids("a") * 50 + [256] * 60 + level_ids(words), id="ids that spell nothing")
    yield pytest.param(FALLBACK, fallback_ids(words), id="fallback")
    yield pytest.param(FALLBACK, fallback_ids("\u6f6e" * 200 + words), id="a run of bytes")
    yield pytest.param(FALLBACK, draw.choices([256, 257, 258, 259, 260], k=400), id="spaces")


@pytest.mark.parametrize(("vocabulary", "ids"), list(kinds()))
def test_a_growing_text_is_that_of_all_its_ids(vocabulary: Tokenizer, ids: list[int]) -> None:
    prompt = ids[:5]
    before, shown = vocabulary.decode(prompt), ""

    def hear(text: str) -> None:
        nonlocal shown
        shown += text

    growing = GrowingText(vocabulary, prompt, ["never written"], hear)
    for number, one in enumerate(ids, start=1):
        assert not growing.add(one)
        whole = vocabulary.decode([*prompt, *ids[:number]])
        expected = whole[len(before) :] if whole.startswith(before) else vocabulary.decode(ids[:number])
        assert growing.text == expected
    growing.finish()
    assert growing.text == expected
    assert shown == expected


@pytest.mark.parametrize("kind", ["text", "no text"])
def test_each_id_costs_the_same_however_long_the_text_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Iterable[int]) -> str:
        decoded.append(len(found := list(ids)))
        return decode(self, found)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = level_ids("The moon moves the sea. \u6f6e" * 90) if kind == "text" else [97] * 2500
    growing = GrowingText(LEVEL, ids[:8], ["over."], None)
    for one in ids:
        growing.add(one)
    assert max(decoded) <= (60 if kind == "text" else 300)
    for one in level_ids(" It is over"):
        assert not growing.add(one)
    assert growing.add(level_ids(".")[0])
    assert growing.text.endswith("It is ")


def test_a_stop_string_is_found_across_what_is_decoded_once() -> None:
    text = "The moon moves the sea. " * 3
    for place in range(20, 60):
        stop = text[place : place + 9]
        growing = GrowingText(LEVEL, [], [stop])
        ended = next(number for number, one in enumerate(level_ids(text)) if growing.add(one))
        assert ended == text.index(stop) + 8
        assert growing.text == text[: text.index(stop)]
