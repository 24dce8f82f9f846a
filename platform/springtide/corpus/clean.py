"""Clean documents before they are tokenised: normalise each, or drop it for a reason that is counted."""

from __future__ import annotations

import collections
import unicodedata

from springtide.config.data import CorpusConfig
from springtide.corpus.quality import RULES
from springtide.corpus.verdict import Verdict


def clean(text: str, config: CorpusConfig) -> Verdict:
    """Return the cleaned text, or the reason why it is dropped. Only ``corpus.quality`` depends on the language."""
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
    edits: collections.Counter[str] = collections.Counter()
    for name in config.quality:
        text, reason, edited = RULES[name](text)
        edits.update(edited)
        if reason:
            return Verdict("", reason)
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
