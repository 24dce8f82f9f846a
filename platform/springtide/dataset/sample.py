"""A sample of the text of all sources, to train a tokenizer on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from springtide.corpus import Broken, clean
from springtide.dataset.parts import PartJob

_MOST_UNITS = 1024
"""Units that are read: one process reads them, and each costs an open file."""


def sample(
    seed: int,
    jobs: Sequence[PartJob],
    characters: int,
    *,
    most_units: int = _MOST_UNITS,
    most_a_unit: int | None = None,
) -> Iterator[str]:
    """Yield at most ``characters`` characters of cleaned documents, equal ones once.

    Each source and each unit gives a part in proportion to its bytes, from its beginning; where there are more than
    ``most_units``, units at equal distances are read, one at least of each source. All of the text is read where it is not more
    than ``characters``. ``most_a_unit``: most documents of a unit.
    """
    rng, seen = np.random.default_rng(seed), set[bytes]()
    chosen = _chosen(rng, jobs, most_units)
    left, left_bytes = characters, sum(num_bytes for _, num_bytes in chosen)
    for index in rng.permutation(len(chosen)).tolist():
        job, num_bytes = chosen[index]
        share = -int(-left * num_bytes // left_bytes)
        left_bytes -= num_bytes
        for found in itertools.islice(job.source.read(job.unit), most_a_unit):
            text = "" if isinstance(found, Broken) else clean(found.text, job.corpus)[0]
            if share <= 0:
                break
            if text and not isinstance(found, Broken) and (digest := found._replace(text=text).digest) not in seen:
                seen.add(digest)
                yield text[:share]
                left, share = left - min(share, len(text)), share - len(text)


def _chosen(rng: np.random.Generator, jobs: Sequence[PartJob], most_units: int) -> list[tuple[PartJob, float]]:
    """Return the units to read, and the bytes of text that each stands for."""
    found: list[tuple[PartJob, float]] = []
    for _, group in itertools.groupby(jobs, key=lambda job: id(job.source)):
        units = list(group)
        number = len(units) if len(jobs) <= most_units else max(1, len(units) * most_units // len(jobs))
        apart = len(units) / number
        for place in np.floor((np.arange(number) + rng.random()) * apart).astype(int).tolist():
            found.append((units[place], apart * max(1, units[place].unit.num_bytes)))
    return found
