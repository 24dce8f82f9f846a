"""Published patterns cut text as their own libraries do; tokenizers that are made here have the special tokens asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken_ext.openai_public as published
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from springtide.config.data import CorpusConfig
from springtide.corpus import open_tokenizer
from springtide.corpus.tokenizer import PATTERNS, _byte_letters, _byte_level_words
from springtide.errors import ConfigError

LETTERS = dict(enumerate(_byte_letters()))


def of_tiktoken(name: str) -> str:
    """The pattern of one of tiktoken's encodings, whose ranks would have to be downloaded."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "load_tiktoken_bpe", lambda *args, **kwargs: {})
        found.append(getattr(published, name)()["pat_str"])
    return found[0]


PUBLISHED = {
    "gpt2": published.r50k_pat_str,
    "gpt4": of_tiktoken("cl100k_base"),
    "gpt4o": of_tiktoken("o200k_base"),
    "llama3": TikTokenConverter.__init__.__defaults__[1],  # type: ignore[index]
    "qwen": PRETOKENIZE_REGEX,
}
"""As the library of each has it, for the engine that the library runs it with."""

WORDS = ["naïve", "🦆🦆", "Ünïcode", "HTMLParser", "中文"]
PIECES = ["don't ", "I'LL", "'S", "'\u017f", " 12345", "\n\n", "  \n", "\r\n x", " ...//\n", *WORDS]
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs", "Cn"))),  # libraries have other versions of Unicode
    st.text("aeIl'Ttsdm 0123456789\n\r\t.,-/é\u0303ß中\u00a0\u2028"),
    st.lists(st.sampled_from(PIECES)).map("".join),
)


@pytest.mark.parametrize("name", PATTERNS)
@given(TEXTS)
@example("a 1234567 b\r\n\r\n  don't DON'T x/\n")
@example("a\n \n ")
@example("\r\x0c")
def test_text_is_cut_as_published(name: str, text: str) -> None:
    ours = _byte_level_words(PATTERNS[name]).pre_tokenize_str(text)
    theirs = regex.findall(PUBLISHED[name], text)
    assert [word for word, _ in ours] == ["".join(LETTERS[byte] for byte in word.encode()) for word in theirs]


def test_every_pattern_can_be_chosen() -> None:
    choices = CorpusConfig.model_json_schema()["properties"]["pretokenizer"]["enum"]
    assert PUBLISHED.keys() == PATTERNS.keys() == set(choices)


@pytest.mark.parametrize(("name", "longest"), [("gpt2", 6), ("gpt4", 3), ("qwen", 1)])
def test_a_trained_bpe_merges_inside_the_words_of_its_pattern(name: str, longest: int) -> None:
    vocabulary = open_tokenizer("bpe", ["x 123456 " * 50], 300, pattern=name)
    [ids] = vocabulary.encode([" 123456"])
    assert max(len(vocabulary.decode([index]).strip()) for index in ids[:-1].tolist()) == longest
    [again] = type(vocabulary).from_json(vocabulary.to_json()).encode([" 123456"])
    assert np.array_equal(ids, again)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_special_tokens_have_ids_that_text_never_gets(kind: str) -> None:
    names = ["<|user|>", "<|reserved_0|>"]
    vocabulary = open_tokenizer(kind, ["user " * 9], 300, end_of_text="<|done|>", special_tokens=names)
    ids = [vocabulary.id_of(name, "corpus.special_tokens") for name in ("<|done|>", *names)]
    assert len(set(ids)) == 3
    assert vocabulary.end_of_text == ids[0]
    assert vocabulary.byte_lengths()[ids].tolist() == [0, 0, 0]
    [found] = vocabulary.encode(["a<|user|> b<|done|>"])
    assert set(found.tolist()) & set(ids) == {ids[0]}
    assert found.tolist().count(ids[0]) == 1
    assert vocabulary.decode(found.tolist()) == "a<|user|> b<|done|>"


@pytest.mark.processes
def test_a_file_s_end_of_text_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(open_tokenizer("bytes", [], 0, end_of_text="<\uff5cend\uff5c>").to_json())
    assert open_tokenizer(str(path), [], 0, end_of_text="<\uff5cend\uff5c>").end_of_text == 256
    with pytest.raises(ConfigError, match=rf"corpus\.end_of_text = '<end>': .*{path}.*<\uff5cend\uff5c>"):
        open_tokenizer(str(path), [], 0, end_of_text="<end>")


def test_special_tokens_are_of_tokenizers_that_are_made_here() -> None:
    with pytest.raises(ValueError, match=r"corpus.special_tokens = .*: are .* 'gpt2\.json'"):
        CorpusConfig(tokenizer="gpt2.json", special_tokens=("<|user|>",))
    with pytest.raises(ValueError, match=r"corpus\.vocab_size = 257: .*256 bytes.* 3 "):
        CorpusConfig(vocab_size=257, special_tokens=("<|user|>", "<|bot|>"))
    assert CorpusConfig(tokenizer="bytes", special_tokens=("<|user|>",)).vocab_size
