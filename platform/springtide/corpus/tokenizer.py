"""Convert text to token ids and back. Only this file and ``tokenizer_probe`` import ``tokenizers``."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from springtide.config.data import END_OF_TEXT
from springtide.corpus.tokenizer_probe import check_bounds, checked_text, mark_probed, parts_of
from springtide.errors import ConfigError, CorpusError, explain
from springtide.storage import Folder

# Patterns by which a byte-level BPE splits text into words before merging. No merge crosses a word boundary.

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UNSPACED = rf"{_SUFFIXES}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": rf"{_UNSPACED}|\s+\z|\s*[\r\n]|\s+(?!\S)|\s",
    "gpt4o": rf"{_CASED}|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}",
    "llama3": rf"{_UNSPACED}|{_SPACES}",
    "qwen": rf"{_SUFFIXES}|{_WORD}|\p{{N}}|{_MARKS}[\r\n]*|{_SPACES}",
}
"""Name -> pattern, as published: GPT-2 (Radford et al., 2019, ``encoder.py``); GPT-4 and GPT-4o (tiktoken's ``cl100k_base``
and ``o200k_base``); Llama 3 (2024, ``tokenizer.py``), which is GPT-4's before the spaces that end a text became one word; Qwen
2 (2024, each digit a word)."""


_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_TIKTOKEN = "tiktoken:"
_BATCH_CHARACTERS = 1_000_000  # limit of one call, whose encodings take about a hundred bytes per token
_SPACE = "\u2581"
"""SentencePiece's symbol for a space."""
_SHOWN = 12
"""Most special tokens that an error lists."""
_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
"""The parts of a ``tokenizer.json`` that determine how its tokens are spelled."""

UNSPLIT = "the tokenizer cannot split"
"""Reason to drop a text that the library cannot encode."""
_MOST_WORD = 10_000
"""Characters at which long words in training texts are cut. Training time grows with the square of a word's length (0.04 s at
this length)."""
_LONG_WORDS = re.compile(rf"\S{{{_MOST_WORD},}}|\s{{{_MOST_WORD},}}")

_log = logging.getLogger(__name__)


class Tokenizer:
    """A tokenizer, its end-of-document id, and the number of bytes that each id stands for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_of_text: str | int = "") -> None:
        """``end_of_text``: the token that ends a document, or its id; empty for the first known name that ``tokenizer`` has.
        CorpusError if it has no known name, ConfigError if it lacks the given token."""
        self.tokenizer = tokenizer
        check_bounds(tokenizer)
        tokenizer.encode_special_tokens = True  # text that spells a special token is encoded as text
        _encode_whole_texts(tokenizer)
        self.end_of_text: int = self._end_of_text(end_of_text)
        """The id that ends a document."""
        self.size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        """One more than the largest id, including special tokens. Some tokenizers leave ids unused."""

    def _end_of_text(self, given: str | int) -> int:
        if isinstance(given, int):
            return given
        if given:
            return self.id_of(given, "corpus.end_of_text")
        ends = [index for name in _KNOWN_ENDS if (index := self.tokenizer.token_to_id(name)) is not None]
        if not ends:
            limit = f"has none of {', '.join(_KNOWN_ENDS)}"
            raise CorpusError(
                explain("corpus.tokenizer", "(file)", limit, "name the token that ends a text, corpus.end_of_text")
            )
        return ends[0]

    def id_of(self, token: str, setting: str) -> int:
        """Return the id of ``token``, the value of ``setting``. ConfigError if the tokenizer does not have it."""
        index = self.tokenizer.token_to_id(token)
        if index is None:
            special = [one.content for one in self.tokenizer.get_added_tokens_decoder().values() if one.special]
            remedy = f"choose one of {', '.join(special[:_SHOWN]) or 'its tokens'}"
            raise ConfigError(explain(setting, token, "is not a token of the tokenizer", remedy))
        return int(index)

    def to_json(self) -> str:
        """Return the content of a ``tokenizer.json`` for this tokenizer, which ``from_json`` reads."""
        text: str = self.tokenizer.to_str()
        mark_probed(text)
        return text

    @classmethod
    def from_json(cls, text: str, name: str = "(file)", end_of_text: str | int = "") -> Tokenizer:
        """Return the tokenizer of a ``tokenizer.json``. ``text``: content of the file; ``name``: its name, for errors;
        ``end_of_text``: as for ``Tokenizer``. CorpusError if the text is not a usable tokenizer."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text), end_of_text)
        except ConfigError as error:
            raise ConfigError(str(error).replace("the tokenizer;", f"the tokenizer {name};")) from None
        except CorpusError as error:
            raise CorpusError(str(error).replace("'(file)'", repr(name))) from None
        except BaseException as error:
            if not is_of_the_library(error):
                raise
            limit = f"is not a tokenizer that can be used ({str(error)[:300]})"
            raise CorpusError(explain("corpus.tokenizer", name, limit, "give a tokenizer.json")) from None

    def encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield one uint32 array of ids per text, the end-of-document id appended. Encodes batches of texts in parallel.

        Raises:
            CorpusError: the library cannot encode a text.
        """
        for ids in self.try_encode(texts):
            if ids is None:
                remedy = "remove long runs of one character from it, or use another tokenizer"
                raise CorpusError(f"{UNSPLIT} a text; {remedy}")
            yield ids

    def try_encode(self, texts: Iterable[str]) -> Iterator[np.ndarray | None]:
        """Yield like ``encode``, but None for a text that the library cannot encode. Its regular expressions fail on some long
        runs of one character, and it panics."""
        for batch in _batches(texts):
            for ids in self._encoded(batch):
                yield None if ids is None else np.array([*ids, self.end_of_text], dtype=np.uint32)

    def _encoded(self, batch: list[str]) -> list[list[int] | None]:
        try:
            return [one.ids for one in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        except BaseException as error:
            if not is_of_the_library(error):
                raise
            if len(batch) == 1:
                return [None]
            return [ids for text in batch for ids in self._encoded([text])]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens. Raises CorpusError if the library cannot decode the ids."""
        [text] = self.decode_all([np.fromiter(ids, np.int64)])
        return text

    def decode_all(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each array of ids, without special tokens, decoded in parallel. Raises CorpusError if the library
        cannot decode the ids."""
        try:
            return list(self.tokenizer.decode_batch([ids.tolist() for ids in documents], skip_special_tokens=True))
        except BaseException as error:
            if not is_of_the_library(error):
                raise
            raise CorpusError(f"the tokenizer cannot decode ids ({str(error)[:300]}); use another tokenizer") from None

    def byte_lengths(self) -> np.ndarray:
        """Return the number of bytes of text that each id stands for, int64 of shape (size,); 0 for special tokens."""
        lengths = np.zeros(self.size, dtype=np.int64)
        spec: dict[str, Any] = json.loads(self.to_json())
        kinds = {kind for step in _STEPS for kind in _kinds(spec.get(step))}
        byte_level = "ByteLevel" in kinds  # each byte is spelled as one character
        fallback = bool(spec["model"].get("byte_fallback")) or "ByteFallback" in kinds
        spaced = any(_SPACE in json.dumps(spec.get(step), ensure_ascii=False) for step in _STEPS)
        words = self.tokenizer.get_vocab(with_added_tokens=False)
        for token, index in words.items():
            if fallback and _FALLBACK.fullmatch(token):
                lengths[index] = 1
            else:
                lengths[index] = len(token) if byte_level else _text_bytes(token, spaced)
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            if added.special:
                lengths[index] = 0
            elif added.content not in words or byte_level:  # texts hold it literally, not in byte letters
                lengths[index] = _text_bytes(added.content, spaced and added.normalized)
        lengths[self.end_of_text] = 0  # not every tokenizer file marks the end-of-text token as special
        return lengths


def is_of_the_library(error: BaseException) -> bool:
    """Return whether ``error`` may come from the library ``tokenizers``: an Exception, or a panic of Rust, which is only a
    BaseException."""
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def check_byte_counts(vocabulary: Tokenizer, name: str, texts: Iterable[str]) -> None:
    """Warn if the byte counts of a tokenizer do not add up to the bytes of ``texts``.

    Bits per byte are then wrong, or refer to the text as changed by the tokenizer's normalizer. One extra byte per text is
    allowed, because SentencePiece puts a space before each text.

    Args:
        name: the value of ``corpus.tokenizer``, for the warning.
    """
    texts, lengths = list(texts), vocabulary.byte_lengths()
    true = [len(text.encode()) for text in texts]
    counted = [int(lengths[ids].sum()) for ids in vocabulary.encode(texts)]
    wrong = sum(found - wanted not in (0, 1) for found, wanted in zip(counted, true, strict=True))
    if wrong:
        spec = json.loads(vocabulary.to_json())
        normalizer = ", ".join(kind for kind in _kinds(spec.get("normalizer")) if kind != "Sequence") or "it has none"
        limit = f"counts {sum(counted)} bytes for the {sum(true)} of {len(texts)} sampled documents, {wrong} of which differ"
        remedy = (
            "bits per byte are off by as much, unless the tokenizer's normalizer is meant to change the text "
            f"(normalizer: {normalizer}); compare losses of this tokenizer only with each other, or use another tokenizer"
        )
        _log.warning("%s", explain("corpus.tokenizer", name, limit, remedy))


def _encode_whole_texts(tokenizer: tokenizers.Tokenizer) -> None:
    """Switch off a tokenizer file's truncation and padding, which would change documents, and log it."""
    for setting, value in (("truncation", tokenizer.truncation), ("padding", tokenizer.padding)):
        if value is not None:
            _log.warning(
                "the tokenizer has %s set (%s): it is switched off here, because it would change the encoded documents",
                setting,
                ", ".join(f"{key} = {given!r}" for key, given in value.items()),
            )
    tokenizer.no_truncation()
    tokenizer.no_padding()


def _kinds(step: dict[str, Any] | None) -> list[str]:
    """Return the types of the steps in a part of a ``tokenizer.json``, such as its decoder, including steps inside a
    sequence."""
    return [part["type"] for part in parts_of(step)]


def _text_bytes(token: str, spaced: bool) -> int:
    """Return the number of UTF-8 bytes of a token's text; ``spaced``: U+2581 stands for a space."""
    return len((token.replace(_SPACE, " ") if spaced else token).encode())


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str = "gpt4", special_tokens: Sequence[str] = (END_OF_TEXT,)
) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` ids on ``texts``. ``pattern``: name in ``PATTERNS`` of the pattern that
    splits words. The first of ``special_tokens`` ends a document."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level_words(PATTERNS[pattern])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_trainable(PATTERNS[pattern], texts), trainer)
    return Tokenizer(tokenizer, special_tokens[0])


def _trainable(pattern: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that the pattern can split, with long words, such as DNA, cut to ``_MOST_WORD`` characters."""
    words = _byte_level_words(pattern)  # a second copy: training locks the tokenizer's copy while it reads these texts
    for text in texts:
        if len(text) <= _MOST_WORD:
            yield text
            continue
        text = _LONG_WORDS.sub(lambda word: word[0][:_MOST_WORD], text)
        try:
            words.pre_tokenize_str(text)
        except BaseException as error:
            if not is_of_the_library(error):
                raise
            continue
        yield text


def _byte_level_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that splits text by a pattern in Oniguruma's syntax, and spells each byte as a letter."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_tokenizer(special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Return a BPE without merges: every byte is an id, the special tokens follow, and the first of them ends a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return Tokenizer(tokenizer, special_tokens[0])


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """Return the ``tiktoken`` encoding ``name`` as a ``tokenizers`` BPE that gives the same ids.

    ConfigError if the package is missing, does not know the encoding, or cannot fetch it.
    """
    try:
        import tiktoken

        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # the package is missing, the name is unknown, or the network failed
        why = str(error).split("\n")[0]
        remedy = "pip install 'springtide[tiktoken]'; without a network, fill TIKTOKEN_CACHE_DIR"
        raise ConfigError(
            explain("corpus.tokenizer", f"{_TIKTOKEN}{name}", f"cannot be opened ({why})", remedy)
        ) from error
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [_last_merge(ranks, token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    ids = {spelled(token): rank for token, rank in ranks.items()} | {END_OF_TEXT: encoding.eot_token}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=[(spelled(left), spelled(right)) for left, right in merges], ignore_merges=True)
    )
    # unlike tiktoken's library, Oniguruma reads {1,3}+ as a repetition of {1,3}, and $ as the end of any line
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", encoding._pat_str).replace("$", r"\z")
    tokenizer.pre_tokenizer = _byte_level_words(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return Tokenizer(tokenizer)


def _byte_letters() -> list[str]:
    """Return the letter with which a byte-level BPE spells each byte (Radford et al., GPT-2, 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two tokens that the last merge joins to ``token``, found by merging its bytes in order of rank."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks) * 2) for left, right in itertools.pairwise(parts)]
        place = joined.index(min(joined))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def open_tokenizer(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = "gpt4",
    end_of_text: str = "",
    special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """Return the tokenizer that ``corpus.tokenizer`` names: trained on ``texts``, bytes, tiktoken's, or from a file.

    ``pattern``: name of the word pattern, for training; ``end_of_text``: the token that ends a document, empty for the usual
    one; ``special_tokens``: further special tokens of a tokenizer that is trained or made of bytes.
    """
    made_here = tuple(dict.fromkeys((end_of_text or END_OF_TEXT, *special_tokens)))
    if kind == "bpe":
        return train_bpe(texts, vocab_size, pattern, made_here)
    if kind == "bytes":
        return byte_tokenizer(made_here)
    if kind.startswith(_TIKTOKEN):
        found = tiktoken_tokenizer(kind.removeprefix(_TIKTOKEN))
        return Tokenizer(found.tokenizer, end_of_text)
    file = tokenizer_file(kind)
    if file is None:
        known = f"is neither 'bpe' nor 'bytes' nor '{_TIKTOKEN}NAME' nor a file"
        raise ConfigError(explain("corpus.tokenizer", kind, known, "give a tokenizer.json"))
    return Tokenizer.from_json(checked_text(Folder(file.parent).read(file.name), kind), kind, end_of_text)


def tokenizer_file(kind: str) -> Path | None:
    """Return the file that ``corpus.tokenizer`` names, or None if it names a built-in or tiktoken tokenizer, or a missing file.

    Examples:
        >>> tokenizer_file("bpe")
    """
    is_named = kind in ("bpe", "bytes") or kind.startswith(_TIKTOKEN)
    file = Path(os.path.expanduser(kind))
    return None if is_named or not file.is_file() else file


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
