"""Quality rules of published corpora: which documents to drop, and which lines. For English text.

``gopher``: Rae et al., "Scaling Language Models" (2112.11446), appendix A, table A1: quality and repetition. A word is what
stands between spaces; a share of characters is of those that are not spaces.

``c4``: Raffel et al., "Exploring the Limits of Transfer Learning" (1910.10683), section 2.2, and what its code removes besides:
citations, notices of terms, lines with a word of more than 1,000 characters. Its list of bad words and its spans of three
sentences that repeat across the corpus are not looked for.

Every rule takes time linear in the text. ``gopher`` looks for repeated runs only in documents that pass its other rules, which
bound the words.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from springtide.corpus.near_duplicates import hash_runs
from springtide.corpus.verdict import Verdict

_WORDS = (50, 100_000)
_WORD_LENGTH = (3, 10)
_SYMBOLS, _BULLETS, _ELLIPSES, _ALPHABETIC = 0.1, 0.9, 0.3, 0.8
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_LEAST_STOP_WORDS = 2
_PUNCTUATION = "\"'.,;:!?()[]\u201c\u201d\u2018\u2019"
_REPEATED, _IN_REPEATED = 0.3, 0.2
_TOP_RUNS = {2: 0.2, 3: 0.18, 4: 0.16}
"""Length of a run of words -> largest share of characters in the most frequent one."""
_REPEATED_RUNS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
"""Length of a run of words -> largest share of characters in runs that occurred before."""

_CITATION = re.compile(r"\[\d{0,9}\]|\[edit\]|\[citation needed\]")
_ENDS = (".", "?", "!", '"', "'")
_CLOSING = "\"')]\u201d\u2019"
_POLICIES = (
    *("terms of use", "privacy policy", "cookie policy", "uses cookies"),
    *("use of cookies", "use cookies"),
)
_LEAST_WORDS, _LEAST_SENTENCES, _LONGEST_WORD = 3, 5, 1000


def gopher(text: str) -> Verdict:
    """Return the text, or the first rule of Gopher that drops it."""
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
    """Return how many items equal an earlier one, and their characters."""
    counts = collections.Counter(items)
    return len(items) - len(counts), sum(len(item) * (count - 1) for item, count in counts.items())


def _repeated_runs(words: Sequence[str]) -> str:
    """Return the rule that repeated runs of words break; empty if none."""
    number: dict[str, int] = collections.defaultdict(itertools.count().__next__)
    ids = np.array([number[word] for word in words], dtype=np.uint64)
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ends, total = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    for width, share in _TOP_RUNS.items():
        _, first, counts = np.unique(hash_runs(ids, width), return_index=True, return_counts=True)
        most = first[counts == counts.max()].min()  # of equally frequent ones the first
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
    """Return the lines that the rules of C4 keep, or the rule that drops the document."""
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
"""Value of ``corpus.quality`` -> what it does."""
