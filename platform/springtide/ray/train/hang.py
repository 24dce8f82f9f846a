"""Detect a worker group that hangs, and record what its ranks are doing before it is ended.

    silence        what is done                                                found by
    4 s            the gRPC port of each rank's process is probed              Watch.lacks, ray.cluster.liveness
    3 steps + 3 s  the stacks of all ranks are sampled twice                   Watch.stalled, elastic.stalled
    elastic.hang   (the setting) the group is replaced, whatever its ranks do  ray.train.scaling_policy

<run>/hangs/step-0000000040-1795249320.txt     the newest collectives and the stacks of all threads of each rank that answers;
                                               which ranks do not answer, and which are behind
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError

from springtide.checkpoint.staging import in_thread
from springtide.elastic.stalled import APART_S, BUSY, STARVED, Frames, doing, first_look_s, is_deadlock, stalled
from springtide.ray._ray_private import Worker
from springtide.ray.cluster.liveness import QUIET_S, Liveness, silent_processes
from springtide.ray.train.mailbox import Progress
from springtide.storage import Folder

LOOK_S = 1.5
"""How long a rank may take to return its stack [s]."""
MOST_HANGS, MOST_SILENT = 3, 10
"""Training fails after this many hangs at one step. First number: hangs in which all ranks answer, so that the code itself
waits for ever. Second number: hangs in which a process does not answer, which is the fault of its node."""
_ANSWER_S = 5.0
_DELAY_OVER_S = 0.3
"""How long a thread is observed to measure its wait for a CPU core [s]."""
_STARVED_SHARE = 0.1
"""A thread is starved if it waits for a CPU core for at least this share of the time. A thread that hangs does not wait for a
core at all."""
_WRITE_S = 5.0
_WORK, _WORKER = "work", "/springtide/ray/train/worker.py"
"""The function that runs in a training thread, and its file."""


def stacks() -> str:
    """Return the stack of each thread of this process as text; called in a worker's process while ``work`` (training) runs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def frames() -> Frames:
    """Return the stack of this process's training thread, innermost frame first, or ``STARVED`` if the thread gets no core.
    Called in a worker's process while ``work`` runs."""
    for ident, frame in sys._current_frames().items():
        stack = [(one.f_code, line) for one, line in traceback.walk_stack(frame)]
        if any(code.co_name == _WORK and code.co_filename.endswith(_WORKER) for code, _ in stack):
            found = tuple(f"{code.co_filename}:{line}" for code, line in stack)
            return STARVED if doing(found) == "else" and _is_starved(ident) else found
    return ()


def _is_starved(ident: int) -> bool:
    """Return True if thread ``ident`` of this process waits for a CPU core. False if the system does not report that."""
    native = next((thread.native_id for thread in threading.enumerate() if thread.ident == ident), None)
    try:
        before_s = _delay_s(native)
        time.sleep(_DELAY_OVER_S)  # the time over which the wait is measured
        return _delay_s(native) - before_s > _STARVED_SHARE * _DELAY_OVER_S
    except (OSError, ValueError):
        return False


def _delay_s(native: int | None) -> float:
    """Return how long a thread of this process has waited for a CPU core since its start [s]. Source:
    Documentation/scheduler/sched-stats.rst."""
    with open(f"/proc/self/task/{native}/schedstat") as file:
        return float(file.read().split()[1]) / 1e9


def look(workers: Sequence[Worker]) -> list[Frames]:
    """Return the stack of each worker's training thread. It is ``BUSY`` if the worker's process is alive but returns no stack
    in time, and empty if the process does not answer a probe."""
    asked = [worker.actor.execute.remote(frames) for worker in workers]
    done = set(ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)[0])
    found: list[Frames] = []
    for answer in asked:
        try:
            found.append(ray.get(answer) if answer in done else ())
        except RayError:
            found.append(())
    unheard = {workers[rank].actor: workers[rank].metadata.node_id for rank, one in enumerate(found) if not one}
    with contextlib.suppress(RayError, OSError):  # if the probe fails, no rank counts as busy
        silent = silent_processes(unheard)
        found = [one if one or worker.actor in silent else BUSY for one, worker in zip(found, workers, strict=True)]
    return found


class Watch:
    """Samples the stacks of the ranks of a silent group (one that sends no events), and finds the ranks that all others wait
    for."""

    def __init__(self) -> None:
        self._before: tuple[int, float, list[Frames]] | None = None
        """The last sample: the step after which the group became silent, the time of the sample [s], and the stack of each
        rank."""
        self.why = ""
        """Why the group hangs, in words; empty if unclear."""
        self.silent: set[int] = set()
        """The ranks that do not answer, if the group hangs."""
        self._liveness = Liveness()

    def lacks(self, workers: Sequence[Worker], progress: Progress) -> bool:
        """Return True if the group sends no events and the process of one of its ranks is gone. Works in any phase, also before
        the first step."""
        if progress.silent_s < QUIET_S or progress.longest_s == math.inf:
            return False
        gone = self._liveness.gone({worker.actor: worker.metadata.node_id for worker in workers})
        if gone:
            self.silent = {rank for rank, worker in enumerate(workers) if worker.actor in gone}
            self.why = f"the process of rank {', '.join(map(str, sorted(self.silent)))} or its host is stopped"
        return bool(gone)

    def is_due(self, progress: Progress) -> bool:
        """Return True if a group that has trained a step is silent for so long that its ranks must be sampled."""
        step_s = progress.prospects.step_s
        return first_look_s(step_s) < progress.silent_s and progress.longest_s < math.inf and step_s > 0

    def stalled(self, workers: Sequence[Worker], progress: Progress) -> bool:
        """Return True if two samples show that a silent group hangs: it waits for some of its ranks, or all ranks wait in a
        collective. Samples are rare, because each costs a call to every worker."""
        before = self._before
        if not self.is_due(progress) or before is None or before[0] != progress.step:
            self.why, self.silent = "", set()
            self._before = self._look(workers, progress.step) if self.is_due(progress) else None
            return False
        if time.monotonic() - before[1] < APART_S:
            return False
        self._before = self._look(workers, progress.step)
        earlier, now = before[2], self._before[2]
        if named := stalled(earlier, now):
            self.why = f"all other ranks wait for {', '.join(map(str, named))}"
        elif is_deadlock(earlier, now, progress.silent_s, progress.prospects.step_s):
            self.why = "all ranks wait in a collective"
        self.silent = {rank for rank in named if not now[rank]}
        return bool(self.why)

    @staticmethod
    def _look(workers: Sequence[Worker], step: int) -> tuple[int, float, list[Frames]]:
        return step, time.monotonic(), look(workers)


def diagnose(
    workers: Sequence[Worker], run: Folder, step: int, known: Collection[int] = ()
) -> tuple[str, list[Worker]]:
    """Write the stacks and newest collectives of ``workers``, ordered by rank, to the run's folder. Returns a summary, and the
    workers whose process is gone. A process that is alive but returns no stack counts as busy. ``known``: ranks that did
    not answer a moment ago. They count as gone, and are neither waited for nor probed again."""
    asked = [worker.actor.execute.remote(stacks) for worker in workers]
    others = [answer for rank, answer in enumerate(asked) if rank not in known]
    done = set(ray.wait(others, num_returns=len(others), timeout=_ANSWER_S)[0]) if others else set()
    unheard = dict[str, Worker]()
    text, collectives = "", _collectives(workers, done, asked)
    for rank, (answer, worker) in enumerate(zip(asked, workers, strict=True)):
        where = f"rank {rank} on node {worker.metadata.node_id[:8]}, pid {worker.metadata.pid}"
        try:
            found = ray.get(answer) if answer in done else ""
        except RayError as error:
            found = str(error)
        if not found:
            unheard[where] = worker
        newest = "".join(f"{one.describe()}\n" for one in collectives.get(rank, ()))
        text += f"{where}\n{newest}{found or 'does not answer'}\n\n"
    lost = {workers[rank].actor for rank in known}  # another probe takes a second
    with contextlib.suppress(RayError, OSError):  # if the probe fails, no other process counts as gone
        lost |= silent_processes(
            {worker.actor: worker.metadata.node_id for worker in unheard.values() if worker.actor not in lost}
        )
    silent = {where: worker for where, worker in unheard.items() if worker.actor in lost}
    late = behind(collectives)
    text = f"{late}\n\n{text}" if late else text
    name = f"step-{step:010d}-{int(time.time())}.txt"
    written = in_thread("springtide-hang", lambda: (run / "hangs").write(name, text), daemon=True)
    summary = (
        f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer" if silent else "every rank answers"
    )
    return f"{summary}{f'; {late}' if late else ''}; {_where(written, name)}", list(silent.values())


def _collectives(
    workers: Sequence[Worker], answered: Collection[object], stacks_of: Sequence[object]
) -> dict[int, list[Collective]]:
    """Return the newest collectives of the ranks that have returned their stacks. The collectives are requested in a second
    call: torch may wait for a lost device there, and by then the stacks have arrived."""
    asked = {
        rank: worker.actor.execute.remote(newest_collectives)
        for rank, (worker, stack) in enumerate(zip(workers, stacks_of, strict=True))
        if stack in answered
    }
    done = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=LOOK_S)[0]) if asked else set()
    found: dict[int, list[Collective]] = {}
    for rank, answer in asked.items():
        with contextlib.suppress(RayError):
            if answer in done:
                found[rank] = ray.get(answer)
    return found


def _where(written: Future[None], name: str) -> str:
    """Return a phrase that says where the stacks are stored. Waits ``_WRITE_S`` at most for the store, because the group itself
    may hang in a call to the store."""
    try:
        written.result(_WRITE_S)
    except TimeoutError:
        return f"their stacks are still being written to hangs/{name}"
    except Exception as error:  # any error of a store's client
        return f"their stacks could not be written: {type(error).__name__}: {error}"
    return f"their stacks are in hangs/{name}"


# Read this rank's newest collectives from torch's flight recorder, and find the rank that is behind in a hang.

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's functions that return the flight recorder of NCCL, and of other backends."""


class Collective(NamedTuple):
    """The newest collective that a rank has begun in a group of ranks."""

    group: str
    number: int
    """How many collectives the rank has begun in this group."""
    name: str
    """Backend and kind, as ``nccl:all_reduce``."""
    sizes: str
    """Shapes of its inputs."""
    is_done: bool

    def describe(self) -> str:
        """Return the collective as text."""
        state = "done" if self.is_done else "under way"
        return f"collective {self.number} of group {self.group}: {self.name} {self.sizes}, {state}"


def newest_collectives() -> list[Collective]:
    """Return the newest collective of each process group of this process, in the order in which these collectives began; empty
    if torch records none."""
    found: dict[str, Collective] = {}
    for entry in _entries():
        group = " ".join(entry.get("process_group") or ["?"])
        number = int(entry.get("collective_seq_id") or 0)
        sizes = " ".join(map(str, entry.get("input_sizes") or ()))
        found.pop(group, None)  # keep the last entry: an earlier process group may have had this name
        found[group] = Collective(group, number, str(entry.get("profiling_name")), sizes, bool(entry.get("retired")))
    return list(found.values())


def _entries() -> Iterator[Mapping[str, Any]]:
    """Yield the recorders' entries, oldest first."""
    private = torch._C._distributed_c10d
    for name in _DUMPS:
        dump = getattr(private, name, None)
        try:
            yield from json.loads(dump()).get("entries") or () if dump else ()
        except (RuntimeError, ValueError, AttributeError):  # the recorder is off, or has another format
            continue


def behind(by_rank: Mapping[int, Sequence[Collective]]) -> str:
    """Return in words which ranks have begun fewer collectives than the other ranks of their group, or another collective;
    empty if there is no such rank.

    Args:
        by_rank: rank -> its newest collectives, for the ranks that answer.

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
        # what ranks should be in: the collective with the highest number; if several have it, the one with the most ranks
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
