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

# Regular expressions by which a byte-level BPE splits text into words before it merges bytes. No merge crosses the end of a
# word.

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
and ``o200k_base``); Llama 3 (2024, ``tokenizer.py``), an older form of GPT-4's pattern that treats spaces at the end of a text
differently; Qwen 2 (2024), in which each digit is a word."""


_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_TIKTOKEN = "tiktoken:"
_BATCH_CHARACTERS = 1_000_000  # per call of ``tokenizers``, which takes about 100 bytes of memory per token
_SPACE = "\u2581"
"""Character that SentencePiece writes in place of a space."""
_SHOWN = 12
"""Maximum number of special tokens that an error message lists."""
_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
"""Parts of a ``tokenizer.json`` that determine how its tokens spell text, for example one letter for each byte."""

UNSPLIT = "the tokenizer cannot split"
"""First words of the error, and of the reason to drop a document, if the library ``tokenizers`` cannot encode a text."""
_MOST_WORD = 10_000
"""Length to which words in training texts are cut [characters]. Training on a word takes time in proportion to the square of
its length: 0.04 s at this length."""
_LONG_WORDS = re.compile(rf"\S{{{_MOST_WORD},}}|\s{{{_MOST_WORD},}}")

_log = logging.getLogger(__name__)


class Tokenizer:
    """A tokenizer, its end-of-document id, and the number of bytes that each id stands for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_of_text: str | int = "") -> None:
        """Wrap a tokenizer of the library ``tokenizers``.

        ``end_of_text``: the token that ends a document, or its id. If it is empty, use the first of ``_KNOWN_ENDS``, such as
        ``</s>``, that the tokenizer has. Raises CorpusError if it has none of them, ConfigError if it lacks the given token."""
        self.tokenizer = tokenizer
        check_bounds(tokenizer)
        tokenizer.encode_special_tokens = True  # a text that spells a special token is encoded as plain text
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
                explain("corpus.tokenizer", "(file)", limit, "set corpus.end_of_text to the token that ends a text")
            )
        return ends[0]

    def id_of(self, token: str, setting: str) -> int:
        """Return the id of ``token``. Raises ConfigError if the tokenizer lacks it; the error names ``setting``, whose value is
        ``token``."""
        index = self.tokenizer.token_to_id(token)
        if index is None:
            special = [one.content for one in self.tokenizer.get_added_tokens_decoder().values() if one.special]
            remedy = f"choose one of {', '.join(special[:_SHOWN]) or 'its tokens'}"
            raise ConfigError(explain(setting, token, "is not a token of the tokenizer", remedy))
        return int(index)

    def to_json(self) -> str:
        """Return this tokenizer as the text of a ``tokenizer.json``. ``from_json`` reads it back."""
        text: str = self.tokenizer.to_str()
        mark_probed(text)
        return text

    @classmethod
    def from_json(cls, text: str, name: str = "(file)", end_of_text: str | int = "") -> Tokenizer:
        """Load a tokenizer from the text of a ``tokenizer.json``. ``name``: name of the file, for errors; ``end_of_text``: the
        token that ends a document, or its id; empty for a known one such as ``</s>``. Raises CorpusError if ``text`` is not a
        usable tokenizer, and ConfigError if the tokenizer lacks the token ``end_of_text``."""
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
            raise CorpusError(explain("corpus.tokenizer", name, limit, "set it to a tokenizer.json file")) from None

    def encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the token ids of each text as a uint32 array, with the end-of-document id appended. Encodes in parallel.

        Raises:
            CorpusError: the library ``tokenizers`` cannot encode a text.
        """
        for ids in self.try_encode(texts):
            if ids is None:
                remedy = "remove long runs of one character from it, or use another tokenizer"
                raise CorpusError(f"{UNSPLIT} a text; {remedy}")
            yield ids

    def try_encode(self, texts: Iterable[str]) -> Iterator[np.ndarray | None]:
        """Yield the ids of each text like ``encode``, but None for a text that the library ``tokenizers`` cannot encode. It
        panics on some long runs of one character, because its regular expressions fail."""
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
        """Decode token ids to text, leaving out special tokens. Raises CorpusError if the library cannot decode the ids."""
        [text] = self.decode_all([np.fromiter(ids, np.int64)])
        return text

    def decode_all(self, documents: Sequence[np.ndarray]) -> list[str]:
        """Decode arrays of token ids to texts, in parallel, leaving out special tokens. Raises CorpusError if the library
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
        byte_level = "ByteLevel" in kinds  # if True, each character of a token stands for one byte
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
            elif added.content not in words or byte_level:  # plain text, not letters that stand for bytes
                lengths[index] = _text_bytes(added.content, spaced and added.normalized)
        lengths[self.end_of_text] = 0  # it ends documents and is no text, even if the file does not mark it as special
        return lengths


def is_of_the_library(error: BaseException) -> bool:
    """Return whether ``error`` may come from the library ``tokenizers``. Its Rust code may panic, which is a BaseException, not
    an Exception. So all errors count except interrupts, exits and a lack of memory."""
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def check_byte_counts(vocabulary: Tokenizer, name: str, texts: Iterable[str]) -> None:
    """Log a warning if the byte counts of token ids (``byte_lengths``) do not add up to the number of bytes in ``texts``.

    In this case the metric bits per byte is wrong, or refers to the text after the tokenizer's normalizer has changed it. One
    extra byte per text is allowed, because SentencePiece puts a space before each text.

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
    """Switch off truncation and padding that the tokenizer file sets, and log it: they would cut or lengthen documents."""
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
    """Return the types of all steps in one part of a ``tokenizer.json``, for example ["Replace", "ByteFallback"] for its
    decoder. Steps inside a ``Sequence`` are included."""
    return [part["type"] for part in parts_of(step)]


def _text_bytes(token: str, spaced: bool) -> int:
    """Return the number of UTF-8 bytes of a token's text. ``spaced``: whether U+2581 in the token stands for a space."""
    return len((token.replace(_SPACE, " ") if spaced else token).encode())


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str = "gpt4", special_tokens: Sequence[str] = (END_OF_TEXT,)
) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` ids on ``texts``. ``pattern``: how to split text into words, a
    name in ``PATTERNS``. The first of ``special_tokens`` is the token that ends a document."""
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
    """Yield the texts to train on. Cut long words, such as DNA, to ``_MOST_WORD`` characters, because they make training slow.
    Skip a text that the library fails to split by the pattern."""
    words = _byte_level_words(pattern)  # a copy, because training locks the tokenizer's pre-tokenizer
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
    """Return a pre-tokenizer that splits text into words by a regular expression (in Oniguruma's syntax), and then writes each
    byte as one letter."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_tokenizer(special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Return a tokenizer whose ids are bytes: a BPE without merges. The special tokens follow the 256 bytes; the first special
    token ends a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return Tokenizer(tokenizer, special_tokens[0])


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """Convert the ``tiktoken`` encoding ``name`` to a BPE of the library ``tokenizers`` that gives the same ids.

    Raises ConfigError if the package tiktoken is missing, does not know the encoding, or cannot download it.
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
    # translate the pattern for Oniguruma, which ``tokenizers`` uses: unlike tiktoken's library, it reads {1,3}+ as a repetition
    # of {1,3}, and $ as the end of any line
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", encoding._pat_str).replace("$", r"\z")
    tokenizer.pre_tokenizer = _byte_level_words(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return Tokenizer(tokenizer)


def _byte_letters() -> list[str]:
    """Return the 256 letters with which a byte-level BPE writes the bytes 0 to 255 (Radford et al., GPT-2, 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two tokens that the last BPE merge joins to ``token``. They are found by merging the bytes of ``token`` in
    order of rank, until two tokens are left."""
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
    """Return the tokenizer that ``kind``, the value of ``corpus.tokenizer``, names: ``bpe`` (trained on ``texts``), ``bytes``,
    ``tiktoken:NAME``, or a tokenizer.json file.

    ``pattern``: name of the pattern that splits words, for training; ``end_of_text``: the token that ends a document, empty for
    the default; ``special_tokens``: more special tokens for ``bpe`` and ``bytes``.
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
        raise ConfigError(explain("corpus.tokenizer", kind, known, "set it to one of these"))
    return Tokenizer.from_json(checked_text(Folder(file.parent).read(file.name), kind), kind, end_of_text)


def tokenizer_file(kind: str) -> Path | None:
    """Return the file that ``kind``, the value of ``corpus.tokenizer``, names. Return None for ``bpe``, ``bytes``,
    ``tiktoken:NAME``, or a file that does not exist.

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
