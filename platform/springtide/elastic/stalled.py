"""Find the rank that a worker group waits for, by what every rank is doing, long before the time limit for a hang.

    no event for three usual steps and some seconds -> a look at every rank, and a second one
    all others wait in a collective, twice, and one does not answer, or stands at the same line -> the group waits for it
    all wait in a collective, twice, after twenty usual steps and half a minute -> it does not end: the group hangs

A rank may stand at the same line for good reasons: it reads rows from a store that is away, waits for Ray, compiles, is slow in
one of torch's functions, or in one that holds Python's lock, or gets no core on a busy machine. Then nobody is named, and the
time limit decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Frames = tuple[str, ...]
"""Stack of a rank's training thread, innermost first, each ``file:line``; empty if its process does not answer."""
BUSY: Frames = ("in a call that holds Python's lock",)
"""Of a rank that says nothing though its process is there."""
STARVED: Frames = ("waits for a core",)
"""Of a rank whose machine runs other processes instead."""
APART_S = 3.0
"""Time between two looks [s]."""
_STEPS, _FIRST_S = 3.0, 3.0
"""The first look comes after this many usual steps, and this much later [s]."""
_FOUND_S = 10.0
"""Ranks that all others wait for are named within three usual steps and this time [s]."""
_DEAD_STEPS, _DEAD_S = 20.0, 30.0
"""A collective that takes this many usual steps, and at least this time, does not end [s]."""
_INNER = 3
"""A thread that waits in a collective is in torch's code for it in one of its innermost frames."""
_COLLECTIVE = ("/torch/distributed/", "/springtide/distributed/collectives.py")
_STORAGE = ("/springtide/stream/", "/springtide/ray/data/", "/springtide/storage/", "/fsspec/")
_RAY, _TORCH = ("/ray/",), ("/torch/",)
_COMPILER = ("/torch/_inductor/", "/torch/_dynamo/convert_frame.py")


def first_look_s(step_s: float) -> float:
    """Return how long a group may be silent until its ranks are looked at, if a step takes ``step_s`` [s].

    Examples:
        >>> first_look_s(2.0)
        9.0
    """
    return _STEPS * step_s + _FIRST_S


def found_by_s(step_s: float) -> float:
    """Return how long after a group's last step the ranks that all others wait for are named at the latest, if a step takes
    ``step_s`` [s].

    Examples:
        >>> found_by_s(2.0)
        16.0
    """
    return _STEPS * step_s + _FOUND_S


def stalled(before: Sequence[Frames], now: Sequence[Frames]) -> list[int]:
    """Return the ranks that the others wait for, as two looks at all ranks tell; empty if that is not plain.

    Args:
        before: the frames of each rank at the first look.
        now: those at the second one.

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
    """Return whether a group that is silent for ``silent_s`` waits for itself: every rank is in a collective, as at the look
    before. That never ends, but a network that is away for some seconds does the same.

    Examples:
        >>> wait = ("/torch/distributed/c10d.py:9",)
        >>> [is_deadlock([wait, wait], [wait, wait], silent_s, step_s=0.1) for silent_s in (29.0, 31.0)]
        [False, True]
    """
    same = bool(now) and before == now and all(doing(frames) == "waits" for frames in now)
    return same and silent_s > max(_DEAD_S, _DEAD_STEPS * step_s)


def doing(frames: Frames) -> Literal["nothing", "waits", "reads", "computes", "else"]:
    """Return what a rank with these frames does.

    Examples:
        >>> doing(("/site-packages/torch/distributed/distributed_c10d.py:1", "/springtide/training/step.py:20"))
        'waits'
    """
    if not frames:
        return "nothing"
    if _any(frames[:_INNER], _COLLECTIVE):
        return "waits"
    theirs = tuple(frame for frame in frames[:_INNER] if "/springtide/" not in frame)  # we have a ray/, too
    if _any(frames, _STORAGE) or _any(theirs, _RAY):  # every stack begins in Ray
        return "reads"
    return "computes" if frames in (BUSY, STARVED) or _any(frames[:1], _TORCH) or _any(frames, _COMPILER) else "else"


def _any(frames: Frames, places: Sequence[str]) -> bool:
    return any(place in frame for frame in frames for place in places)
