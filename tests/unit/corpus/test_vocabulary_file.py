"""A tokenizer.json of somebody else's: what it has set for another use does no harm, and every byte of text is counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from springtide.corpus import Tokenizer, check_byte_counts, open_tokenizer
from springtide.corpus.tokenizer import train_bpe
from springtide.errors import CorpusError

TEXTS = ["def one(two): return three\n" * 20, "class Four:\n    pass\n" * 20]


def saved(tokenizer: tokenizers.Tokenizer, folder: Path) -> str:
    """The path of its file."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.processes
@pytest.mark.parametrize("what", ["truncation", "padding"])
def test_a_file_that_cuts_or_pads_texts_gives_whole_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A file that cuts or pads texts gives whole documents and says so."""
    plain = train_bpe(TEXTS, 300)
    changed = tokenizers.Tokenizer.from_str(plain.to_json())
    if what == "truncation":
        changed.enable_truncation(16)
    else:
        changed.enable_padding(length=64)
    with caplog.at_level(logging.WARNING):
        vocabulary = open_tokenizer(saved(changed, tmp_path), [], 0)
    texts = ["one two " * 250, "one"]
    for found, expected in zip(vocabulary.encode(texts), plain.encode(texts), strict=True):
        assert found.tolist() == expected.tolist()
    assert f"has {what} set" in caplog.text
    assert Tokenizer.from_json(vocabulary.to_json()).to_json() == plain.to_json()


def byte_fallback(prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece and byte fallback: as Llama 2's with a space before each text, or as Gemma's with added tokens."""
    words = ["\u2581", "a", "b", "c", "d", "\u00fc", "\u2581\u2581"]
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {piece: number for number, piece in enumerate(words, start=256)}
    model = models.BPE(vocab=pieces, merges=[("\u2581", "\u2581")], byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    spaces, steps = normalizers.Replace(" ", "\u2581"), [decoders.Replace("\u2581", " "), decoders.ByteFallback()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokenizer.add_special_tokens(["</s>"])
    if not prefix:
        tokenizer.add_tokens([AddedToken("\u2581\u2581", normalized=False), AddedToken("<table>", normalized=False)])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-NeoX's: runs of spaces added as tokens that are not special."""
    tokenizer = train_bpe(TEXTS, 300).tokenizer
    tokenizer.add_tokens([AddedToken(" " * width, normalized=True) for width in range(2, 12)])
    tokenizer.add_tokens(["\u2192\u2192"])
    return tokenizer


LLAMA, GEMMA, LEVEL = Tokenizer(byte_fallback(True)), Tokenizer(byte_fallback(False)), Tokenizer(byte_level())


@given(
    st.lists(st.sampled_from(["a", "b ", " c", "\n", "\t", "   ", "\u00fc", "\u2192\u2192", "\U0001f986", "<table>"]))
)
def test_bytes_of_fallback_and_of_added_tokens_are_counted(pieces: list[str]) -> None:
    text = "a" + "".join(pieces)
    for vocabulary, prefix in ((LLAMA, 1), (GEMMA, 0), (LEVEL, 0)):  # a space before each text
        [ids] = vocabulary.encode([text])
        assert vocabulary.byte_lengths()[ids].sum() == len(text.encode()) + prefix
        assert vocabulary.decode(ids.tolist()) == text


def test_single_ids_stand_for_the_bytes_they_spell() -> None:
    for vocabulary, token, expected in (
        (GEMMA, "<0x0A>", 1),
        (GEMMA, "\u00fc", 2),
        (GEMMA, "\u2581\u2581", 2),
        (GEMMA, "<table>", 7),
        (GEMMA, "</s>", 0),
        (LEVEL, " " * 11, 11),
        (LEVEL, "\u2192\u2192", 6),
        (LEVEL, "<|endoftext|>", 0),
    ):
        assert vocabulary.byte_lengths()[vocabulary.tokenizer.token_to_id(token)] == expected, token


def test_counts_that_are_right_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for vocabulary in (LLAMA, GEMMA, LEVEL):
            check_byte_counts(vocabulary, "here", ["a b\n\n  \u00fc\U0001f986", "", "d" * 100])
    assert not caplog.text


def test_a_vocabulary_whose_counts_are_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2, "</s>": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    lower = train_bpe(TEXTS, 300).tokenizer
    lower.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    texts = ["one two three", "one", "cafe\u0301"]
    for tokenizer, counted, normalizer in ((words, 11, "it has none"), (lower, 21, "NFC, StripAccents")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_byte_counts(Tokenizer(tokenizer), "here/tokenizer.json", texts)
        assert f"corpus.tokenizer = 'here/tokenizer.json': counts {counted} bytes for the 22 of" in caplog.text
        assert normalizer in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"\xff", b"{" * 1000, b'{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(text)
    with pytest.raises(CorpusError, match=rf"corpus\.tokenizer = '{file}': .*tokenizer"):
        open_tokenizer(str(file), (), 0)


@pytest.mark.processes
def test_a_tokenizer_without_an_end_of_text_is_named(tmp_path: Path) -> None:
    file = saved(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), tmp_path)
    with pytest.raises(CorpusError, match=rf"corpus\.tokenizer = '{file}': .*none of"):
        open_tokenizer(file, (), 0)
