"""Clean documents before they are tokenised: normalise each, or drop it for a reason that is counted."""

from __future__ import annotations

import collections
import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator

from springtide.config.code import find_code
from springtide.config.data import CorpusConfig
from springtide.corpus.chats import Turn, with_texts
from springtide.corpus.language import check_languages, language
from springtide.corpus.own_filter import own_filter
from springtide.corpus.pii import mask
from springtide.corpus.quality import RULES
from springtide.corpus.verdict import Verdict


def clean(text: str, config: CorpusConfig) -> Verdict:
    """Return the cleaned text, or the reason why it is dropped. Only ``corpus.quality`` and
    ``corpus.languages`` depend on the language."""
    if config.broken_text == "drop" and "\ufffd" in text:
        return Verdict("", "not UTF-8")
    if config.normalization != "none":
        text = unicodedata.normalize(config.normalization, text)
    if not text.strip():
        return Verdict("", "empty")
    if len(text) < config.min_characters:
        return Verdict("", "short")
    if config.max_characters and len(text) > config.max_characters:
        return Verdict("", "long")
    if config.max_repetition < 1 and repetition(text) > config.max_repetition:
        return Verdict("", "repetitive")
    if config.max_symbols < 1 and symbols(text) > config.max_symbols:
        return Verdict("", "symbols")
    if config.languages and (found := language(text)) not in config.languages:
        return Verdict("", f"language {found}")
    return _apply(text, _rules(config))


def clean_turns(turns: Iterable[Turn], config: CorpusConfig) -> tuple[Turn, ...]:
    """Return the turns of a chat as ``clean`` changes its text: normalised, personal data masked."""

    def cleaned(text: str) -> str:
        if config.normalization != "none":
            text = unicodedata.normalize(config.normalization, text)
        return mask(text, config.pii).text

    return tuple(with_texts(turn, cleaned) for turn in turns)


def check_clean(config: CorpusConfig) -> None:
    """Raise ConfigError if a rule cannot be applied here: a package or the user's own function is missing."""
    check_languages(config.languages)
    if config.filter:
        find_code("corpus.filter", config.filter)


def _rules(config: CorpusConfig) -> Iterator[Callable[[str], Verdict]]:
    yield from (RULES[name] for name in config.quality)
    if config.filter:
        yield functools.partial(own_filter, config.filter)
    if config.pii:
        yield functools.partial(mask, kinds=config.pii)


def _apply(text: str, rules: Iterable[Callable[[str], Verdict]]) -> Verdict:
    edits: collections.Counter[str] = collections.Counter()
    for rule in rules:
        text, reason, edited = rule(text)
        if reason:
            return Verdict("", reason)
        edits.update(edited)
    return Verdict(text, "", edits)


def repetition(text: str) -> float:
    """Return the share of characters in lines that repeat an earlier line (Rae et al., Gopher, 2021, appendix A)."""
    lines = collections.Counter(line for line in (raw.strip() for raw in text.splitlines()) if line)
    total = sum(len(line) * count for line, count in lines.items())
    return sum(len(line) * (count - 1) for line, count in lines.items()) / total if total else 0.0


def symbols(text: str) -> float:
    """Return the share of characters, not counting spaces, that are not letters, marks or digits of any script."""
    seen = [char for char in text if not char.isspace()]
    plain = sum(char.isalnum() or unicodedata.category(char)[0] == "M" for char in seen)
    return 1 - plain / len(seen) if seen else 0.0
