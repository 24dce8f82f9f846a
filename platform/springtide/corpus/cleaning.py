"""Clean documents before they are tokenised: normalise each, or drop it for a reason that is counted."""

from __future__ import annotations

import collections
import functools
import ipaddress
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from springtide.config.code import find_code
from springtide.config.data import CorpusConfig
from springtide.corpus.chats import Turn, with_texts
from springtide.corpus.near_duplicates import hash_runs
from springtide.errors import ConfigError, explain

# Quality rules of published corpora, for English text: they drop documents, or lines of documents.
#
# ``gopher``: Rae et al., "Scaling Language Models" (2112.11446), appendix A, table A1: quality and repetition. Words are
# separated by spaces. A share of characters is computed among the characters that are not spaces.
#
# ``c4``: Raffel et al., "Exploring the Limits of Transfer Learning" (1910.10683), section 2.2, and the rules of its code
# that the paper does not name: citations, notices of terms, lines with a word of more than 1,000 characters. Two rules of C4
# are not applied: the list of bad words, and the removal of three-sentence spans that repeat across the corpus.
#
# Every rule takes time linear in the text. ``gopher`` searches for repeated runs of words only in documents that pass its
# other rules, because these limit the number of words.

_WORDS = (50, 100_000)
_WORD_LENGTH = (3, 10)
_SYMBOLS, _BULLETS, _ELLIPSES, _ALPHABETIC = 0.1, 0.9, 0.3, 0.8
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_LEAST_STOP_WORDS = 2
_PUNCTUATION = "\"'.,;:!?()[]\u201c\u201d\u2018\u2019"
_REPEATED, _IN_REPEATED = 0.3, 0.2
_TOP_RUNS = {2: 0.2, 3: 0.18, 4: 0.16}
"""n -> largest allowed share of a document's characters in all copies of its most frequent run of n consecutive words."""
_REPEATED_RUNS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
"""n -> largest allowed share of a document's characters in runs of n consecutive words that occurred earlier in it."""

_CITATION = re.compile(r"\[\d{0,9}\]|\[edit\]|\[citation needed\]")
_ENDS = (".", "?", "!", '"', "'")
_CLOSING = "\"')]\u201d\u2019"
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies"),
    *("use of cookies", "use cookies"),
)
_LEAST_WORDS, _LEAST_SENTENCES, _LONGEST_WORD = 3, 5, 1000


def gopher(text: str) -> Verdict:
    """Apply Gopher's quality and repetition rules: return the text unchanged, or the first rule that it breaks."""
    words = text.split(None, _WORDS[1])
    reason = _gopher_words(text, words)
    if not reason:
        lines = list(map(str.strip, text.splitlines()))
        reason = _gopher_lines(list(filter(None, lines))) or _gopher_repetition(words, lines)
    return Verdict("", f"gopher: {reason}") if reason else Verdict(text)


def _gopher_words(text: str, words: Sequence[str]) -> str:
    if len(words) < _WORDS[0]:
        return f"fewer than {_WORDS[0]} words"
    if len(words) > _WORDS[1]:
        return f"more than {_WORDS[1]:,} words"
    length = sum(map(len, words)) / len(words)
    if not _WORD_LENGTH[0] <= length <= _WORD_LENGTH[1]:
        return f"mean word length outside {_WORD_LENGTH[0]} to {_WORD_LENGTH[1]}"
    if text.count("#") > _SYMBOLS * len(words) or text.count("...") + text.count("\u2026") > _SYMBOLS * len(words):
        return "more than 0.1 # or ... per word"
    if sum(word.isalpha() or any(map(str.isalpha, word)) for word in words) < _ALPHABETIC * len(words):
        return "fewer than 80% of words with a letter"
    if len(_STOP_WORDS.intersection(word.strip(_PUNCTUATION) for word in words)) < _LEAST_STOP_WORDS:
        return f"fewer than {_LEAST_STOP_WORDS} stop words"
    return ""


def _gopher_lines(lines: Sequence[str]) -> str:
    if sum(line.startswith(("\u2022", "-")) for line in lines) > _BULLETS * len(lines):
        return "more than 90% of lines begin with a bullet"
    if sum(line.endswith(("...", "\u2026")) for line in lines) > _ELLIPSES * len(lines):
        return "more than 30% of lines end with an ellipsis"
    return ""


def _gopher_repetition(words: Sequence[str], lines: Sequence[str]) -> str:
    paragraphs = ["\n".join(group) for is_text, group in itertools.groupby(lines, key=bool) if is_text]
    for name, items in (("paragraphs", paragraphs), ("lines", list(filter(None, lines)))):
        repeats, characters = _repeats(items)
        if repeats > _REPEATED * len(items):
            return f"more than {_REPEATED:.0%} of {name} repeat"
        if characters > _IN_REPEATED * sum(map(len, items)):
            return f"more than {_IN_REPEATED:.0%} of characters in repeated {name}"
    return _repeated_runs(words)


def _repeats(items: Sequence[str]) -> tuple[int, int]:
    """Count the items that equal an earlier item. Return their number, and the number of characters in them."""
    counts = collections.Counter(items)
    return len(items) - len(counts), sum(len(item) * (count - 1) for item, count in counts.items())


def _repeated_runs(words: Sequence[str]) -> str:
    """Return the first rule on repeated runs of words that a document breaks. Return "" if it breaks none of these rules."""
    number: dict[str, int] = collections.defaultdict(itertools.count().__next__)
    ids = np.array([number[word] for word in words], dtype=np.uint64)
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ends, total = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    for width, share in _TOP_RUNS.items():
        _, first, counts = np.unique(hash_runs(ids, width), return_index=True, return_counts=True)
        most = first[counts == counts.max()].min()  # if several runs are equally frequent, take the first
        if counts.max() * (ends[most + width] - ends[most]) > share * total:
            return f"more than {share:.0%} of characters in the most frequent run of {width} words"
    for width, share in _REPEATED_RUNS.items():
        hashes = hash_runs(ids, width)
        again = np.ones(len(hashes), dtype=np.int64)
        again[np.unique(hashes, return_index=True)[1]] = 0
        covers = np.cumsum(again)
        covers = np.concatenate([covers, np.full(width - 1, covers[-1])])
        covers[width:] -= np.cumsum(again)[: len(covers) - width]
        if lengths[covers > 0].sum() > share * total:
            return f"more than {share:.0%} of characters in repeated runs of {width} words"
    return ""


def c4(text: str) -> Verdict:
    """Apply C4's rules to a document: return the lines to keep, or the rule that drops the whole document."""
    kept, sentences, edits = [], 0, collections.Counter[str]()
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if not words:
            continue
        if any(len(word) > _LONGEST_WORD for word in words):
            edits["c4: lines with a word of more than 1,000 characters"] += 1
            continue
        line, citations = _CITATION.subn("", line)
        edits["c4: citations"] += citations
        if not line.endswith(_ENDS) or line.endswith("..."):
            edits["c4: lines that end without terminal punctuation"] += 1
            continue
        if len(words) < _LEAST_WORDS:
            edits[f"c4: lines of fewer than {_LEAST_WORDS} words"] += 1
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return Verdict("", "c4: lorem ipsum")
        if "javascript" in lower:
            edits["c4: lines with javascript"] += 1
            continue
        if "{" in line:
            return Verdict("", "c4: curly bracket")
        if any(policy in lower for policy in _POLICIES):
            edits["c4: lines with notices of terms or cookies"] += 1
            continue
        kept.append(line)
        sentences += max(1, sum(word.rstrip(_CLOSING).endswith((".", "?", "!")) for word in words))
    if sentences < _LEAST_SENTENCES:
        return Verdict("", f"c4: fewer than {_LEAST_SENTENCES} sentences")
    return Verdict("\n".join(kept), "", +edits)


RULES: dict[str, Callable[[str], Verdict]] = {"gopher": gopher, "c4": c4}
"""Value of ``corpus.quality`` -> function that applies its rules."""


# Masks for personal data: email addresses, and public IP addresses of both versions.
#
# FineWeb masks the same kinds of data (Penedo et al., 2406.17557). RFC 2606, 5737 and 3849 reserve the replacement
# addresses for examples. Private and reserved IP addresses are not masked. Every pattern matches a bounded length, so the
# time is linear in the text.

_EMAIL = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}"
)
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)")
_IPV6 = re.compile(r"(?<![0-9A-Za-z:])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{1,34}(?<!:)(?![0-9A-Za-z])")
"""Matches IPv6 addresses that begin with 2 or 3, as all global unicast addresses do. So it seldom matches other text with
colons, such as times and C++ names."""


def _email(text: str) -> tuple[str, int]:
    return _EMAIL.subn("email@example.com", text) if "@" in text else (text, 0)


def _ip_addresses(text: str) -> tuple[str, int]:
    masked = 0

    def replace(found: re.Match[str], mask: str) -> str:
        nonlocal masked
        try:
            is_public = ipaddress.ip_address(found.group()).is_global
        except ValueError:
            is_public = False
        masked += is_public
        return mask if is_public else found.group()

    text = _IPV4.sub(lambda found: replace(found, "192.0.2.1"), text)
    return _IPV6.sub(lambda found: replace(found, "2001:db8::1"), text), masked


_MASKS: dict[str, Callable[[str], tuple[str, int]]] = {"emails": _email, "ip_addresses": _ip_addresses}


def mask(text: str, kinds: Iterable[str]) -> Verdict:
    """Return the text with personal data of these kinds masked: ``emails``, ``ip_addresses``.

    >>> mask("write to jo@mail.example.net or 8.8.8.8, not to 127.0.0.1", ["emails", "ip_addresses"]).text
    'write to email@example.com or 192.0.2.1, not to 127.0.0.1'
    """
    edits: dict[str, int] = {}
    for kind in kinds:
        text, count = _MASKS[kind](text)
        edits |= {f"pii: {kind} masked": count} if count else {}
    return Verdict(text, "", edits)


# A user's own filter: ``corpus.filter`` names a function that returns the text of a document, changed or not, or None to
# drop the document.

_FIELD = "corpus.filter"
_SHOWN = 80


def own_filter(source: str, text: str) -> Verdict:
    """Apply the user's own function to the text of a document. ``source`` names the function, which may be called in any
    process. The caller must have checked that the user's code may run (``config.check_trusted``).

    Raises:
        ConfigError: the function cannot be imported, raises an error, or returns neither a text nor None.
    """
    function = find_code(_FIELD, source)
    shown = f"a text that begins {text[:_SHOWN]!r}"
    try:
        found = function(text)
    except Exception as error:
        problem = f"raised {type(error).__name__} ({error}) for {shown}"
        raise ConfigError(explain(_FIELD, source, problem, "mend it")) from error
    if found is None or found == "":
        return Verdict("", source)
    if not isinstance(found, str):
        problem = f"returned a {type(found).__name__} for {shown}"
        raise ConfigError(explain(_FIELD, source, problem, "return the text, or None to drop it"))
    return Verdict(found, "", {} if found == text else {f"{source}: changed": 1})


# Detect the language of a text with lingua (the extra ``springtide[language]``).

_CHARACTERS = 2_000
"""Number of characters at the beginning of a text that are read to detect its language."""


def language(text: str) -> str:
    """Return the ISO 639-1 code of the language at the beginning of ``text``; ``unknown`` if it cannot be detected.

    All languages of the library lingua are candidates. Its low accuracy mode is used: for texts of more than about 120
    characters, this mode is as exact as the high accuracy mode.
    """
    found = _detector().detect_language_of(text[:_CHARACTERS])
    return found.iso_code_639_1.name.lower() if found else "unknown"


def check_languages(codes: Sequence[str]) -> None:
    """Raise ConfigError if lingua does not know a code of ``corpus.languages``, or if the package lingua is not installed."""
    if not codes:
        return
    known = sorted(one.iso_code_639_1.name.lower() for one in _lingua(codes).Language.all())
    for code in codes:
        if code not in known:
            remedy = f"choose from {', '.join(known)}"
            raise ConfigError(
                explain("corpus.languages", code, "is not the ISO 639-1 code of a language known here", remedy)
            )


@functools.cache
def _detector() -> Any:
    return _lingua(()).LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()


def _lingua(codes: Sequence[str]) -> Any:
    try:
        import lingua
    except ImportError:
        problem, remedy = "need lingua-language-detector, which is not installed", "pip install 'springtide[language]'"
        raise ConfigError(explain("corpus.languages", list(codes), problem, remedy)) from None
    return lingua


def clean(text: str, config: CorpusConfig) -> Verdict:
    """Return the cleaned text, or the reason to drop it. The settings ``corpus.quality`` and ``corpus.languages`` treat texts
    of different languages differently; all other settings do not."""
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
    """Normalise each text of a chat and mask its personal data, as ``clean`` does for documents. Return the new turns."""

    def cleaned(text: str) -> str:
        if config.normalization != "none":
            text = unicodedata.normalize(config.normalization, text)
        return mask(text, config.pii).text

    return tuple(with_texts(turn, cleaned) for turn in turns)


def check_clean(config: CorpusConfig) -> None:
    """Raise ConfigError if a configured rule cannot be applied because a package or the user's own function is missing."""
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
    """Return the share of characters that are in lines equal to an earlier line (Rae et al., Gopher, 2021, appendix A)."""
    lines = collections.Counter(line for line in (raw.strip() for raw in text.splitlines()) if line)
    total = sum(len(line) * count for line, count in lines.items())
    return sum(len(line) * (count - 1) for line, count in lines.items()) / total if total else 0.0


def symbols(text: str) -> float:
    """Return the share of characters, not counting spaces, that are not letters, marks or digits of any script."""
    seen = [char for char in text if not char.isspace()]
    plain = sum(char.isalnum() or unicodedata.category(char)[0] == "M" for char in seen)
    return 1 - plain / len(seen) if seen else 0.0


# The result of a rule for a document's text.


class Verdict(NamedTuple):
    """Result of a rule for a document: the text to keep, perhaps changed, or the reason to drop it."""

    text: str
    """The text to keep; empty if it is dropped."""
    reason: str = ""
    """The rule that drops the text; empty if it is kept."""
    edits: Mapping[str, int] = MappingProxyType({})
    """Kind of change, such as lines removed by a rule -> number of changes."""
