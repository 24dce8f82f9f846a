"""Generate random traces (which nodes exist when) of reliable clusters, where nodes fail at random and are replaced."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from springtide.elastic.copies import Domain
from springtide.elastic.traces import Trace, of_nodes


@dataclasses.dataclass(frozen=True)
class FailureRates:
    """How often a cluster has failures, and what share of them are hangs or losses of a whole rack."""

    mttf_s: float
    """Mean time between failures of the whole cluster [s]."""
    spare_s: float = 120.0
    """Time until a lost node is replaced [s]."""
    hangs: float = 0.0
    """Share of the failures in which a process hangs and no node is lost."""
    racks: float = 0.0
    """Share of the failures in which all nodes of a rack are lost at once."""
    rack_nodes: int = 16
    """Number of nodes of a rack. A rack is a failure domain: its nodes may be lost together."""


def poisson_failures(nodes: int, length_s: float, rates: FailureRates, seed: int = 0) -> Trace:
    """Return a trace of the failures and replacements of ``nodes`` nodes over ``length_s`` [s]; failures are a Poisson process.

    >>> found = poisson_failures(4, 100 * 3600.0, FailureRates(mttf_s=3600.0, hangs=0.5))
    >>> found.most, len(found.changes) // 2, len(found.hangs_s)
    (4, 48, 57)
    """
    rows = [(0.0, True, _name(place, 0)) for place in range(nodes)]
    places, hangs, domains = list(range(nodes)), list[float](), dict[str, Domain]()
    returns_s, lives = [0.0] * nodes, [0] * nodes
    chance = random.Random(seed)
    for time_s in _times(chance, rates.mttf_s, length_s):
        kind, first = chance.random(), chance.choice(places)
        if kind < rates.hangs:
            hangs.append(time_s)
            continue
        rack = first // rates.rack_nodes * rates.rack_nodes
        many = range(rack, min(rack + rates.rack_nodes, nodes))
        for place in many if kind < rates.hangs + rates.racks else (first,):
            if returns_s[place] <= time_s:  # else this place has no node: its replacement has not joined yet
                rows.append((time_s, False, _name(place, lives[place])))
                lives[place] += 1
                returns_s[place] = time_s + rates.spare_s
                if returns_s[place] < length_s:
                    rows.append((returns_s[place], True, _name(place, lives[place])))
    for place in places:
        domains |= {_name(place, life): (f"rack{place // rates.rack_nodes}",) for life in range(lives[place] + 1)}
    return dataclasses.replace(of_nodes(rows), end_s=length_s, domains=domains, hangs_s=tuple(hangs))


def _times(chance: random.Random, mean_s: float, length_s: float) -> Iterator[float]:
    time_s = chance.expovariate(1 / mean_s)
    while time_s < length_s:
        yield time_s
        time_s += chance.expovariate(1 / mean_s)


def _name(place: int, life: int) -> str:
    return f"{place:05}.{life}"
