"""Which datasets of a run may train on text that another one holds out.

Two datasets are apart if one was prepared with the other in ``corpus.apart_from``: then neither trains on what the other holds
out. Otherwise near copies leak; copies too, unless both hold out the same fraction: which documents depends on their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from springtide.errors import ConfigError, explain
from springtide.shards import Manifest

_REMEDY = "prepare the later one with the other's URL in corpus.apart_from"


def check_fractions(corpora: Mapping[str, Manifest], urls: Mapping[str, str]) -> None:
    """Raise ConfigError if copies of a text may be held out in one corpus and trained on in another."""
    for held, trained in _not_apart(corpora, corpora):
        here, there = corpora[trained].heldout_fraction, corpora[held].heldout_fraction
        if here != there:
            limit = (
                f"holds out {here:.6g} of its documents and {held} {there:.6g} (shards.heldout_fraction, less if that is more "
                "than shards.heldout_tokens), so copies of a text are held out in one and trained on in the other"
            )
            remedy = f"{_REMEDY}, or both with the smaller fraction"
            raise ConfigError(explain(f"stream.mixture.{trained}", urls[trained], limit, remedy))


def leaks(corpora: Mapping[str, Manifest], eval_only: Mapping[str, Manifest]) -> Iterator[str]:
    """Yield a warning for each held-out set whose text, or a near copy of it, may be trained on."""
    found: dict[str, list[str]] = {}
    for held, trained in (*_not_apart(corpora, corpora), *_not_apart(eval_only, corpora)):
        found.setdefault(held, []).append(trained)
    for held, where in found.items():
        yield f"stream.mixture: the held-out text of {held} may be in the training text of {', '.join(where)}: {_REMEDY}"


def _not_apart(held: Mapping[str, Manifest], trained: Mapping[str, Manifest]) -> Iterator[tuple[str, str]]:
    """Yield (name of a held-out set, name of a corpus) of datasets that are not apart; a pair of corpora once."""
    records = {name: (one.digest, frozenset(one.apart_from)) for name, one in {**held, **trained}.items()}
    places = {name: place for place, name in enumerate(trained)}
    for name in held:
        digest, known = records[name]
        for other, place in places.items():
            if other != name and places.get(name, -1) < place:
                theirs, known_there = records[other]
                if digest != theirs and digest not in known_there and theirs not in known:
                    yield name, other
