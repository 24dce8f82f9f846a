"""Fill in the middle: nothing of a text is lost, and where it is cut depends on the text and the seed alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.config.data import CorpusConfig
from springtide.corpus import Document, Infilling, Tokenizer, check_pieces, infill, open_tokenizer
from springtide.errors import ConfigError

TOKENS = CorpusConfig().fim_tokens
VOCABULARY = open_tokenizer("bytes", [], 0, special_tokens=TOKENS)
PREFIX, SUFFIX, MIDDLE = (VOCABULARY.id_of(name, "") for name in TOKENS)


def infilling(rate: float = 1.0, span: int = 10_000, seed: int = 0) -> Infilling:
    return Infilling(rate, PREFIX, SUFFIX, MIDDLE, span, seed)


def segments(document: Document, how: Infilling) -> list[np.ndarray] | None:
    length = len(document.text.encode() if document.ids is None else document.ids)
    [found] = infill([document], [length], VOCABULARY, how)
    return found


def restored(segment: np.ndarray) -> tuple[str, str]:
    """(order, text) of a segment."""
    ids = segment.tolist()
    if ids[0] != PREFIX:
        assert not {PREFIX, SUFFIX, MIDDLE} & {*ids}
        return "", VOCABULARY.decode(ids)
    after, between = ids.index(SUFFIX), ids.index(MIDDLE)
    assert (ids.count(PREFIX), ids.count(SUFFIX), ids.count(MIDDLE)) == (1, 1, 1)
    prefix, suffix, rest = (
        VOCABULARY.decode(part) for part in (ids[1:after], ids[after + 1 : between], ids[between + 1 :])
    )
    return ("SPM", rest + suffix) if after == 1 else ("PSM", prefix + rest + suffix)


@settings(max_examples=40)
@given(st.text(max_size=200), st.sampled_from([0.3, 1.0]), st.integers(1, 60), st.integers(0, 5))
def test_no_character_is_lost(text: str, rate: float, span: int, seed: int) -> None:
    document = Document("a", text)
    found = segments(document, infilling(rate, span, seed))
    if found is None:
        assert rate < 1
        return
    assert "".join(restored(segment)[1] for segment in found) == text
    again = segments(Document("elsewhere", text), infilling(rate, span, seed))
    assert [one.tolist() for one in again or ()] == [one.tolist() for one in found]
    plain = [not restored(segment)[0] for segment in found]
    assert not any(one and other for one, other in itertools.pairwise(plain))


def test_rate_and_orders_are_as_stated() -> None:
    documents = [Document("a", f"{number} lines of text " * 20) for number in range(2000)]
    found = list(infill(documents, [400] * len(documents), VOCABULARY, infilling(0.5)))
    orders = [restored(one[0])[0] for one in found if one is not None]
    assert abs(len(orders) / 2000 - 0.5) < 0.04
    assert abs(orders.count("SPM") / len(orders) - 0.5) < 0.06
    other = list(infill(documents, [400] * len(documents), VOCABULARY, infilling(0.5, seed=1)))
    assert [one is None for one in found] != [one is None for one in other]
    assert list(infill(documents, [400] * len(documents), VOCABULARY, infilling(0.0))) == [None] * 2000


def test_a_long_document_is_reordered_in_parts() -> None:
    text = "".join(f"line {number}\n" for number in range(400))
    found = segments(Document("a", text), infilling(1.0, 500))
    assert found is not None
    assert len(found) == -(-len(text) // 500)
    assert max(map(len, found)) <= 500 + 3
    assert "".join(restored(segment)[1] for segment in found) == text


def test_token_ids_are_cut_between_tokens() -> None:
    ids = np.frombuffer("caf\u00e9 au lait".encode(), np.uint8)
    [whole] = VOCABULARY.encode(["caf\u00e9 au lait"])
    document = Document("a", "caf\u00e9 au lait", whole[:-1])
    found = segments(document, infilling())
    assert found is not None
    assert sorted(found[0].tolist()) == sorted([*whole[:-1].tolist(), PREFIX, SUFFIX, MIDDLE])
    assert len(ids) == len(whole) - 1


def test_a_tokenizer_that_puts_a_space_before_each_text_is_refused() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(models.BPE({"</s>": 0, "\u2581": 1, "x": 2}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens(["</s>"])
    with pytest.raises(ConfigError, match=r"corpus\.fim = 0\.5.*'x' .*'x x'"):
        check_pieces(Tokenizer(library), "corpus.fim", 0.5)
    check_pieces(VOCABULARY, "corpus.fim", 0.5)


def test_the_tokens_are_three_and_a_tokenizer_made_here_gets_them() -> None:
    with pytest.raises(ValueError, match=r"three .*tokens"):
        CorpusConfig(fim_tokens=("a", "a", "b"))
    assert CorpusConfig().named_tokens == ()
    assert CorpusConfig(fim=0.5, special_tokens=("x",)).named_tokens == ("x", *TOKENS)
    only_one = CorpusConfig.model_validate({"sources": {"a": {"source": "a"}, "b": {"source": "b", "fim": 0.5}}})
    assert only_one.named_tokens == TOKENS
