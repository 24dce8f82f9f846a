"""Find the rank that a worker group waits for, from the Python stacks of all ranks, long before the hang timeout.

    no event for 3 usual step times plus 3 s -> sample the stacks of all ranks, twice
    in both samples a rank gives no stack or is at the same line, all others wait in a collective -> that rank stalls
    in both samples all ranks wait in a collective, and 20 usual step times (at least 30 s) have passed -> deadlock

A rank may be at the same line twice for a good reason. It may read rows from an unreachable store, wait for Ray, compile, run a
slow function of torch or one that holds the GIL, or get no core on a busy machine. Then no rank is named, and the hang timeout
decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Frames = tuple[str, ...]
"""Stack of a rank's training thread, innermost first, each ``file:line``; empty if its process does not answer."""
BUSY: Frames = ("in a call that holds Python's lock",)
"""Stands for the stack of a rank whose process is alive but does not return its stack: a call holds the GIL."""
STARVED: Frames = ("waits for a core",)
"""Stands for the stack of a rank that gets no CPU core because its machine runs other processes."""
APART_S = 3.0
"""Time between two samples of the stacks [s]."""
_STEPS, _FIRST_S = 3.0, 3.0
"""The first sample of the ranks' stacks is taken after this many usual step times without an event, plus this time [s]."""
_FOUND_S = 10.0
"""A stalled rank is reported within ``_STEPS`` usual step times plus this time after its group's last step [s]."""
_DEAD_STEPS, _DEAD_S = 20.0, 30.0
"""A collective that takes longer than this many usual step times, and than this time, counts as a deadlock [s]."""
_INNER = 3
"""Number of innermost frames in which torch's code for collectives shows that a thread waits in a collective."""
_COLLECTIVE = ("/torch/distributed/", "/springtide/distributed/collectives.py")
_STORAGE = ("/springtide/stream/", "/springtide/ray/data/", "/springtide/storage/", "/fsspec/")
_RAY, _TORCH = ("/ray/",), ("/torch/",)
_COMPILER = ("/torch/_inductor/", "/torch/_dynamo/convert_frame.py")


def first_look_s(step_s: float) -> float:
    """Return how long a group may report no event before the stacks of its ranks are sampled; ``step_s``: time of a step [s].

    Examples:
        >>> first_look_s(2.0)
        9.0
    """
    return _STEPS * step_s + _FIRST_S


def found_by_s(step_s: float) -> float:
    """Return the time after a group's last step within which stalled ranks are reported; ``step_s``: time of a step [s].

    Examples:
        >>> found_by_s(2.0)
        16.0
    """
    return _STEPS * step_s + _FOUND_S


def stalled(before: Sequence[Frames], now: Sequence[Frames]) -> list[int]:
    """Return the ranks that all other ranks wait for, judged by two samples of the stacks; empty if these are ambiguous.

    Args:
        before: the stack of each rank in the first sample.
        now: the stack of each rank in the second sample.

    Examples:
        >>> wait, stand = ("/torch/distributed/c10d.py:9",), ("my_model.py:7",)
        >>> stalled([wait, stand, wait], [wait, stand, wait]), stalled([wait, ()], [wait, ()])
        ([1], [1])
        >>> stalled([wait, stand], [wait, ("my_model.py:8",)]), stalled([stand], [stand])
        ([], [])
    """
    if len(before) != len(now):
        return []
    found, num_waiting = [], 0
    for rank, (first, second) in enumerate(zip(before, now, strict=True)):
        if (doing(first), doing(second)) == ("waits", "waits"):
            num_waiting += 1
        elif first == second and doing(second) in ("nothing", "else"):
            found.append(rank)
        else:
            return []
    return found if num_waiting else []


def is_deadlock(before: Sequence[Frames], now: Sequence[Frames], silent_s: float, step_s: float) -> bool:
    """Return whether a group without an event for ``silent_s`` is deadlocked: in both samples of its stacks every rank waits
    in a collective, at the same line. A network outage of some seconds looks alike, so ``silent_s`` must be long.

    Examples:
        >>> wait = ("/torch/distributed/c10d.py:9",)
        >>> [is_deadlock([wait, wait], [wait, wait], silent_s, step_s=0.1) for silent_s in (29.0, 31.0)]
        [False, True]
    """
    same = bool(now) and before == now and all(doing(frames) == "waits" for frames in now)
    return same and silent_s > max(_DEAD_S, _DEAD_STEPS * step_s)


def doing(frames: Frames) -> Literal["nothing", "waits", "reads", "computes", "else"]:
    """Return what a rank with this stack is doing: ``nothing`` without a stack, ``waits`` in a collective.

    Examples:
        >>> doing(("/site-packages/torch/distributed/distributed_c10d.py:1", "/springtide/training/step.py:20"))
        'waits'
    """
    if not frames:
        return "nothing"
    if _any(frames[:_INNER], _COLLECTIVE):
        return "waits"
    theirs = tuple(frame for frame in frames[:_INNER] if "/springtide/" not in frame)  # not Ray: springtide/ray/
    if _any(frames, _STORAGE) or _any(theirs, _RAY):  # Ray in innermost frames only: the outermost are always Ray's
        return "reads"
    return "computes" if frames in (BUSY, STARVED) or _any(frames[:1], _TORCH) or _any(frames, _COMPILER) else "else"


def _any(frames: Frames, places: Sequence[str]) -> bool:
    return any(place in frame for frame in frames for place in places)
