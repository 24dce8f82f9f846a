"""Find the rank that a worker group waits for, from the Python stacks of all ranks, long before the hang timeout.

    no event for 3 median step times plus 3 s -> sample the stacks of all ranks twice, 3 s apart
    in both samples, a rank returns no stack or is at the same line, and all other ranks wait in a collective -> the rank stalls
    in both samples, all ranks wait in a collective, and no event for 20 median step times (at least 30 s) -> deadlock

A rank may be at the same line twice for a good reason. It may read rows from an unreachable store, wait for Ray, compile, run a
slow function of torch or one that holds the GIL, or get no core on a busy machine. In these cases no rank is named, and only
the hang timeout ends the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Frames = tuple[str, ...]
"""Stack of a rank's training thread, innermost first, each ``file:line``; empty if its process does not answer."""
BUSY: Frames = ("in a call that holds Python's lock",)
"""Used in place of the stack of a rank whose process is alive but cannot return its stack, because a call holds the GIL."""
STARVED: Frames = ("waits for a core",)
"""Used in place of the stack of a rank that gets no CPU core because its machine is busy with other processes."""
APART_S = 3.0
"""Time between the two samples of the ranks' stacks [s]."""
_STEPS, _FIRST_S = 3.0, 3.0
"""The ranks' stacks are sampled after ``_STEPS`` median step times plus ``_FIRST_S`` seconds without an event [s]."""
_FOUND_S = 10.0
"""A stalled rank is reported at most ``_STEPS`` median step times plus this time after its group's last step [s]."""
_DEAD_STEPS, _DEAD_S = 20.0, 30.0
"""A collective counts as deadlocked after ``_DEAD_STEPS`` median step times, but not before ``_DEAD_S`` seconds [s]."""
_INNER = 3
"""A thread waits in a collective if one of this many innermost frames is in torch's code for collectives."""
_COLLECTIVE = ("/torch/distributed/", "/springtide/distributed/collectives.py")
_STORAGE = ("/springtide/stream/", "/springtide/ray/data/", "/springtide/storage/", "/fsspec/")
_RAY, _TORCH = ("/ray/",), ("/torch/",)
_COMPILER = ("/torch/_inductor/", "/torch/_dynamo/convert_frame.py")


def first_look_s(step_s: float) -> float:
    """Return how long a group may report no event before the stacks of its ranks are sampled; ``step_s``: median step time [s].

    Examples:
        >>> first_look_s(2.0)
        9.0
    """
    return _STEPS * step_s + _FIRST_S


def found_by_s(step_s: float) -> float:
    """Return the longest time from a group's last step to the report of a stalled rank; ``step_s``: median step time [s].

    Examples:
        >>> found_by_s(2.0)
        16.0
    """
    return _STEPS * step_s + _FOUND_S


def stalled(before: Sequence[Frames], now: Sequence[Frames]) -> list[int]:
    """Return the ranks that all other ranks wait for, judged by two samples of the stacks. Empty if the samples do not show it
    clearly, for example because a rank moved to another line or reads from the store.

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
    in a collective, at the same line. A network outage of some seconds looks the same, so ``silent_s`` must be above 30 s and
    20 times ``step_s``.

    Examples:
        >>> wait = ("/torch/distributed/c10d.py:9",)
        >>> [is_deadlock([wait, wait], [wait, wait], silent_s, step_s=0.1) for silent_s in (29.0, 31.0)]
        [False, True]
    """
    same = bool(now) and before == now and all(doing(frames) == "waits" for frames in now)
    return same and silent_s > max(_DEAD_S, _DEAD_STEPS * step_s)


def doing(frames: Frames) -> Literal["nothing", "waits", "reads", "computes", "else"]:
    """Return what a rank with this stack is doing: ``nothing`` without a stack, ``waits`` in a collective, ``reads`` from
    storage or waits for Ray, ``computes`` in torch or its compiler, ``else`` for all other code.

    Examples:
        >>> doing(("/site-packages/torch/distributed/distributed_c10d.py:1", "/springtide/training/step.py:20"))
        'waits'
    """
    if not frames:
        return "nothing"
    if _any(frames[:_INNER], _COLLECTIVE):
        return "waits"
    theirs = tuple(frame for frame in frames[:_INNER] if "/springtide/" not in frame)  # springtide/ray/ is our code
    if _any(frames, _STORAGE) or _any(theirs, _RAY):  # innermost frames: all stacks begin in Ray's code
        return "reads"
    return "computes" if frames in (BUSY, STARVED) or _any(frames[:1], _TORCH) or _any(frames, _COMPILER) else "else"


def _any(frames: Frames, places: Sequence[str]) -> bool:
    return any(place in frame for frame in frames for place in places)
