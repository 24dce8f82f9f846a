"""Quality rules: each by a text that breaks it alone, and none slow on hostile text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from springtide.config.data import CorpusConfig
from springtide.corpus import clean
from springtide.corpus.cleaning import c4, gopher

_rng = random.Random(0)
_VOCABULARY = ["".join(_rng.choices("abcdefghijklmnop", k=_rng.randint(3, 7))) for _ in range(500)]


def words(number: int, seed: int = 1) -> list[str]:
    return ["the", "and", *random.Random(seed).choices(_VOCABULARY, k=number - 2)]


def text_of(found: list[str], width: int = 10) -> str:
    return "\n".join(" ".join(found[at : at + width]) for at in range(0, len(found), width))


PLAIN = text_of(words(400))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PLAIN, ""),
        (text_of(words(49)), "fewer than 50 words"),
        (text_of(words(50)), ""),
        (text_of(words(100_001)), "more than 100,000 words"),
        (text_of([word[:2] for word in words(300)]), "mean word length outside 3 to 10"),
        (text_of([word * 3 for word in words(300)]), "mean word length outside 3 to 10"),
        (
            text_of([f"#{word}" if at % 9 == 0 else word for at, word in enumerate(words(300))]),
            "more than 0.1 # or ...",
        ),
        (
            text_of([f"{word}..." if at % 9 == 0 else word for at, word in enumerate(words(300))]),
            "more than 0.1 # or ...",
        ),
        ("- " + PLAIN.replace("\n", "\n- "), "more than 90% of lines begin with a bullet"),
        (PLAIN.replace("\n", "\u2026\n"), "more than 30% of lines end with an ellipsis"),
        (text_of([word if at % 4 else "1234" for at, word in enumerate(words(300))]), "fewer than 80% of words with"),
        (text_of(["these", *words(300)[2:]]), "fewer than 2 stop words"),
        ("\n\n".join([*PLAIN.splitlines()[:20], *["And the same again."] * 15]), "more than 30% of paragraphs repeat"),
        ("\n\n".join([*PLAIN.splitlines()[:20], *[PLAIN[:300]] * 5]), "20% of characters in repeated paragraphs"),
        (PLAIN + "\nso be it" * 30, "more than 30% of lines repeat"),
        (PLAIN + f"\n{' '.join(words(30, 2))}" * 10, "more than 20% of characters in repeated lines"),
        (text_of([part for word in words(300) for part in ("over there", word)]), "the most frequent run of 2 words"),
        (text_of(words(400)[:150] + words(400)[5:80], 7), "characters in repeated runs of 5 words"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_each_rule_of_gopher_drops_what_breaks_it(text: str, reason: str) -> None:
    found = gopher(text)
    assert found.text == ("" if reason else text)
    assert reason in found.reason
    assert found.reason.startswith("gopher: ") or not reason


def test_words_in_runs_that_overlap_count_once() -> None:
    """A run of 17 words that comes twice in 170: a tenth of the characters, at any width of a run."""
    base = [f"{word}{at:03d}" for at, word in enumerate(["the", "and", *["word"] * 151])]
    found = ["the", "and", *base[2:], *base[2:19]]
    assert gopher(text_of(found, 11)).reason == "gopher: more than 10% of characters in repeated runs of 10 words"
    assert gopher(text_of([*found, *(f"more{at}" for at in range(20))], 11)).reason == ""


LINES = [f"This is sentence number {at} of the page." for at in range(6)]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("A line without an end", "lines that end without terminal punctuation"),
        ("A line that goes on...", "lines that end without terminal punctuation"),
        ("Two words.", "lines of fewer than 3 words"),
        ("Please enable JavaScript to read on.", "lines with javascript"),
        ("See our Privacy Policy for more.", "lines with notices of terms or cookies"),
        (f"A long {'x' * 1001} word.", "lines with a word of more than 1,000 characters"),
    ],
)
def test_each_rule_of_c4_removes_its_lines(line: str, rule: str) -> None:
    found = c4("\n".join([*LINES, line]))
    assert (found.text, found.reason) == ("\n".join(LINES), "")
    assert found.edits == {f"c4: {rule}": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n".join([*LINES, "Lorem ipsum dolor sit amet."]), "lorem ipsum"),
        ("\n".join([*LINES, "function f() { return 1 }."]), "curly bracket"),
        ("\n".join(LINES[:4]), "fewer than 5 sentences"),
        (" ".join(LINES[:5]), ""),
    ],
)
def test_each_rule_of_c4_drops_what_breaks_it(text: str, reason: str) -> None:
    assert c4(text).reason == (f"c4: {reason}" if reason else "")


def test_citations_are_removed_and_counted() -> None:
    found = c4("\n".join(LINES).replace(" of", "[12] of[edit]"))
    assert found.text == "\n".join(LINES)
    assert found.edits == {"c4: citations": 12}


def test_rules_apply_in_their_order_and_their_edits_are_summed() -> None:
    text = "\n".join([*LINES[:5], "no end"])
    assert clean(text, CorpusConfig(quality=("c4",))).edits == {"c4: lines that end without terminal punctuation": 1}
    assert clean(text, CorpusConfig(quality=("gopher", "c4"))).reason == "gopher: fewer than 50 words"
    assert clean(text, CorpusConfig(quality=())) == (text, "", {})


HOSTILE: dict[str, Any] = {
    "one word": lambda n: "x" * n,
    "dots": lambda n: "." * n,
    "dots and letters": lambda n: "..a" * (n // 3),
    "opening brackets": lambda n: "[" * n,
    "digits of a citation": lambda n: "[" + "1" * n,
    "quotes": lambda n: "the and " + '"' * n,
    "line ends": lambda n: "\n" * n + "x",
    "spaces": lambda n: "x\n" + " " * n,
    "short words": lambda n: "a " * (n // 2),
    "the same words": lambda n: "the and " * (n // 8),
    "prefixes of lorem ipsum": lambda n: "lorem " * (n // 6) + ".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_take_linear_time(name: str) -> None:
    """A rule that is quadratic would take hours on these 10 MB."""
    text = HOSTILE[name](10 * 2**20)
    gopher(text)
    c4(text)
