"""Patterns by which a byte-level BPE cuts text into words before it merges; no merge crosses a cut."""

from __future__ import annotations

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
and ``o200k_base``); Llama 3 (2024, ``tokenizer.py``), as GPT-4's was before the spaces that end a text became one word; Qwen 2
(2024, each digit a word)."""
