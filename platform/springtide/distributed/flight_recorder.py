"""What this rank's newest collectives were, by the recorder that torch keeps of them, and which rank is behind in a hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's functions that return the recorder of NCCL, and of other backends."""


class Collective(NamedTuple):
    """The newest collective that a rank has begun in a group of ranks."""

    group: str
    number: int
    """How many collectives the rank has begun in this group."""
    name: str
    """Backend and kind, as ``nccl:all_reduce``."""
    sizes: str
    """Shapes of what goes in."""
    is_done: bool

    def describe(self) -> str:
        """Return the collective as text."""
        state = "done" if self.is_done else "under way"
        return f"collective {self.number} of group {self.group}: {self.name} {self.sizes}, {state}"


def newest_collectives() -> list[Collective]:
    """Return the newest collective of each group of this process, in the order in which they began; none if this torch keeps no
    records."""
    found: dict[str, Collective] = {}
    for entry in _entries():
        group = " ".join(entry.get("process_group") or ["?"])
        number = int(entry.get("collective_seq_id") or 0)
        sizes = " ".join(map(str, entry.get("input_sizes") or ()))
        found.pop(group, None)  # a name may be that of an earlier group, too: what came last counts
        found[group] = Collective(group, number, str(entry.get("profiling_name")), sizes, bool(entry.get("retired")))
    return list(found.values())


def _entries() -> Iterator[Mapping[str, Any]]:
    """Yield the recorders' entries, oldest first."""
    private = torch._C._distributed_c10d
    for name in _DUMPS:
        dump = getattr(private, name, None)
        try:
            yield from json.loads(dump()).get("entries") or () if dump else ()
        except (RuntimeError, ValueError, AttributeError):  # a recorder that is off, or of another form
            continue


def behind(by_rank: Mapping[int, Sequence[Collective]]) -> str:
    """Return which ranks have begun fewer collectives than the others of their group, or another one; empty if none.

    Args:
        by_rank: rank -> its newest collectives, of the ranks that answer.

    Examples:
        >>> first = Collective("0 default_pg", 7, "nccl:all_reduce", "[4]", False)
        >>> behind({0: [first], 1: [first], 2: [first._replace(number=6)]})
        'rank 2 is in collective 6 of group 0 default_pg (nccl:all_reduce [4]), others in 7 (nccl:all_reduce [4])'
        >>> behind({0: [first], 1: [first]})
        ''
    """
    groups: dict[str, dict[int, Collective]] = {}
    for rank, all_of_rank in sorted(by_rank.items()):
        for one in all_of_rank:
            groups.setdefault(one.group, {})[rank] = one
    found = []
    for group, members in groups.items():
        each = {rank: (one.number, f"{one.name} {one.sizes}") for rank, one in members.items()}
        # the furthest; where there are several, that of most ranks
        counts = Counter(each.values())
        last, what = max(counts, key=lambda one: (one[0], counts[one]))
        late: dict[tuple[int, str], list[int]] = {}
        for rank, here in each.items():
            if here != (last, what):
                late.setdefault(here, []).append(rank)
        for (number, other), ranks in sorted(late.items()):
            who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
            found.append(f"{who} in collective {number} of group {group} ({other}), others in {last} ({what})")
    return "; ".join(found)
