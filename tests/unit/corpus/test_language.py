"""The languages to keep; lingua itself is an extra."""

from __future__ import annotations

import builtins
import importlib.util
from typing import Any

import pytest

from springtide.config.data import CorpusConfig
from springtide.corpus import check_clean, clean
from springtide.errors import ConfigError

TEXTS = {
    "en": "The committee met on Tuesday to discuss the budget, and most of its members agreed with the proposal.",
    "de": "Der Ausschuss trat am Dienstag zusammen, um den Haushalt zu besprechen, und die meisten stimmten zu.",
    "fr": "Le comit\u00e9 s'est r\u00e9uni mardi pour discuter du budget, et la plupart de ses membres ont accept\u00e9.",
}


@pytest.mark.skipif(importlib.util.find_spec("lingua") is None, reason="lingua is not installed")
def test_texts_in_other_languages_are_dropped_by_name() -> None:
    config = CorpusConfig(languages=("en", "fr"))
    check_clean(config)
    assert {code: clean(text, config).reason for code, text in TEXTS.items()} == {
        "en": "",
        "de": "language de",
        "fr": "",
    }
    assert clean("1234 5678 ????", config).reason == "language unknown"
    with pytest.raises(ConfigError, match=r"corpus\.languages = 'xx'.*ISO 639-1.*af, ar"):
        check_clean(CorpusConfig(languages=("xx",)))


def test_a_missing_package_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_lingua(name: str, *arguments: Any) -> Any:
        if name == "lingua":
            raise ImportError(name)
        return load(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_lingua)
    with pytest.raises(ConfigError, match=r"corpus.languages = .*'en'.*pip install 'springtide\[language\]'"):
        check_clean(CorpusConfig(languages=("en",)))


def test_a_code_has_two_letters() -> None:
    with pytest.raises(ValueError, match="languages"):
        CorpusConfig(languages=("english",))
