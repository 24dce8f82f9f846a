"""The language of a text, by lingua (the extra ``springtide[language]``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from springtide.errors import ConfigError, explain

_CHARACTERS = 2_000
"""Characters at the beginning of a text that decide."""


def language(text: str) -> str:
    """Return the ISO 639-1 code of the language that the beginning of ``text`` is written in; ``unknown`` if it cannot be told.

    All of lingua's languages compete, by its low accuracy mode: as exact as the other from some 120 characters on.
    """
    found = _detector().detect_language_of(text[:_CHARACTERS])
    return found.iso_code_639_1.name.lower() if found else "unknown"


def check_languages(codes: Sequence[str]) -> None:
    """Raise ConfigError if a code of ``corpus.languages`` is not one of lingua's, or the package is missing."""
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
