"""Read traces: records of spot capacity, that is, which nodes (or how many) existed when. Generate random traces of reliable
clusters, whose nodes fail at random and are replaced.

    Bamboo         time_ms,add|remove,node             one line for each change of a node
    SkyPilot       {"metadata": {"gap_seconds"}, "data": [number of nodes at each tick]}
    Google Cloud   date, time, number of nodes         lines not always in order of time
    step curve     hours,number of nodes

If a record has only numbers of nodes, the nodes that joined last are assumed to be lost first. Sources: Bamboo (Thorpe et al.,
NSDI 2023), Can't Be Late (Wu et al., NSDI 2024).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from springtide.elastic.copies import Domain
from springtide.errors import ConfigError, explain

_GAP = 10.0
"""The interval between two samples of a record is a gap if it is longer than this many times the median interval."""


class Change(NamedTuple):
    """Nodes that join or are lost at one time."""

    time_s: float
    joined: tuple[str, ...]
    gone: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The changes of a cluster's nodes in order of time. The cluster starts without nodes."""

    changes: tuple[Change, ...]
    end_s: float
    domains: Mapping[str, Domain] = dataclasses.field(default_factory=dict)
    """Failure domains of the nodes for which they are known."""
    hangs_s: tuple[float, ...] = ()
    """Times at which a process hangs, without the loss of a node [s]."""
    unknown_s: float = 0.0
    """Total time in gaps, long intervals without a sample [s]. Within a gap, the number of nodes is assumed not to change."""

    @property
    def numbers(self) -> list[tuple[float, int]]:
        """(time, number of nodes from then on) for each time at which nodes join or are lost [s]."""
        found, number = [], 0
        for change in self.changes:
            number += len(change.joined) - len(change.gone)
            found.append((change.time_s, number))
        return found

    @property
    def most(self) -> int:
        """Largest number of nodes at one time."""
        return max((number for _, number in self.numbers), default=0)


def read(text: str, name: str) -> Trace:
    """Parse a record of spot capacity, in any of the four formats that the module lists. Raises ConfigError, with ``name`` as
    the record's name, if it is in no known format."""
    try:
        if text.lstrip().startswith("{"):
            record = json.loads(text)
            gap_s = float(record["metadata"]["gap_seconds"])
            return of_numbers([(tick * gap_s, int(number)) for tick, number in enumerate(record["data"])], gap_s)
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(row)]
        if rows[0][1] in ("add", "remove"):
            kinds = {"add": True, "remove": False}
            last = rows.pop() if len(rows[-1]) == 1 else None  # a last row with only a time is the end of the record
            found = of_nodes([(float(row[0]) / 1000, kinds[row[1]], row[2]) for row in rows])
            if last is None:
                return found
            end_s = float(last[0]) / 1000
            _check_time(end_s, found.end_s)
            return dataclasses.replace(found, end_s=end_s)
        if len(rows[0]) == 3:
            times = sorted((dt.datetime.fromisoformat(f"{row[0]} {row[1]}"), int(row[2])) for row in rows)
            samples = [((time - times[0][0]).total_seconds(), number) for time, number in times]
            return dataclasses.replace(of_numbers(samples), unknown_s=_gaps_s([time_s for time_s, _ in samples]))
        return of_numbers([(float(row[0]) * 3600, round(float(row[1]))) for row in rows])
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        formats = "Bamboo's CSV, SkyPilot's JSON, dated numbers, or hours and numbers"
        raise ConfigError(
            explain("trace", name, f"is not in a known format ({error})", f"give one of {formats}")
        ) from None


def of_nodes(rows: Iterable[tuple[float, bool, str]]) -> Trace:
    """Build a trace from rows of (seconds, whether the node joins, node). If a node joins that has already joined, or is lost
    without having joined, the row is ignored. Raises ValueError if a time is not finite."""
    here: set[str] = set()
    by_time: dict[float, tuple[list[str], list[str]]] = {}
    for time_s, joins, node in sorted(rows, key=lambda row: row[0]):
        _check_time(time_s)
        joined, gone = by_time.setdefault(time_s, ([], []))
        if joins != (node in here):
            here ^= {node}
            (joined if joins else gone).append(node)
    changes = [Change(time_s, tuple(joined), tuple(gone)) for time_s, (joined, gone) in by_time.items()]
    return Trace(tuple(change for change in changes if change.joined or change.gone), max(by_time, default=0.0))


def of_numbers(rows: Sequence[tuple[float, int]], last_s: float = 0.0) -> Trace:
    """Build a trace from rows of (seconds, number of nodes); the trace ends ``last_s`` after the last row [s]. Raises
    ValueError if a number is negative, or if times are not finite and in order."""
    here: list[str] = []
    changes, born, before_s = [], 0, 0.0
    for time_s, number in rows:
        _check_time(time_s, before_s)
        if number < 0:
            raise ValueError(f"{number} nodes at {time_s:g} s")
        before_s = time_s
        joined = tuple(f"node{born + one}" for one in range(max(0, number - len(here))))
        gone = tuple(here[number:])
        born += len(joined)
        here = [*here[:number], *joined]
        if joined or gone:
            changes.append(Change(time_s, joined, gone))
    _check_time(before_s + last_s, before_s)
    return Trace(tuple(changes), before_s + last_s)


def _gaps_s(times_s: Sequence[float]) -> float:
    """Return the total time in gaps, intervals between two samples that are much longer than the median interval [s]. One
    median interval of each gap is not counted."""
    apart_s = [after - before for before, after in itertools.pairwise(times_s)]
    usual_s = statistics.median(apart_s) if apart_s else 0.0
    return sum(each - usual_s for each in apart_s if each > _GAP * usual_s)


def _check_time(time_s: float, before_s: float = 0.0) -> None:
    if not before_s <= time_s < math.inf:
        raise ValueError(f"{time_s:g} s is not a finite time at or after {before_s:g} s")


def larger(trace: Trace, times: int, seed: int = 0) -> Trace:
    """Return a trace with the nodes of ``times`` clusters. Each cluster replays ``trace`` from a different start time, and
    continues at the beginning when ``trace`` ends. The nodes of a cluster are one failure domain: they may be lost together."""
    chance = random.Random(seed)
    rows: list[tuple[float, bool, str]] = []
    for copy in range(times):
        begin_s = chance.random() * trace.end_s if copy else 0.0
        again_s = trace.end_s - begin_s
        rows += [(0.0, True, f"{copy}-{node}") for node in _there(trace, begin_s)]
        rows += _moved(trace, copy, -begin_s, begin_s, math.inf)
        if copy:
            ended = _there(trace, trace.end_s) - _there(trace, 0.0)
            rows += [(again_s, False, f"{copy}-{node}") for node in ended]
            rows += _moved(trace, copy, again_s, -math.inf, begin_s)
    domains = {node: (node.partition("-")[0],) for _, _, node in rows}
    return dataclasses.replace(of_nodes(rows), end_s=trace.end_s, domains=domains, unknown_s=trace.unknown_s)


def smaller(trace: Trace, most: int) -> list[tuple[float, int]]:
    """Return (seconds, number of nodes) for each change, with the numbers scaled so that they are from 1 to ``most``."""
    found: list[tuple[float, int]] = []
    for time_s, number in trace.numbers:
        scaled = max(1, math.ceil(number * most / max(1, trace.most)))
        if not found or found[-1][1] != scaled:
            found.append((time_s, scaled))
    return found


def _there(trace: Trace, time_s: float) -> set[str]:
    here: set[str] = set()
    for change in trace.changes:
        if change.time_s <= time_s:
            here = (here | {*change.joined}) - {*change.gone}
    return here


def _moved(trace: Trace, copy: int, by_s: float, after_s: float, until_s: float) -> list[tuple[float, bool, str]]:
    return [
        (change.time_s + by_s, joins, f"{copy}-{node}")
        for change in trace.changes
        if after_s < change.time_s <= until_s
        for joins, nodes in ((True, change.joined), (False, change.gone))
        for node in nodes
    ]


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
            if returns_s[place] <= time_s:  # otherwise the place is empty: the lost node is not replaced yet
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
