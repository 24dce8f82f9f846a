"""Plays inputs in child processes with limits: what takes too much time or memory ends the child, and is found."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from fuzz.target import TOLD, Target, Violation
from springtide.errors import SpringtideError, UnfitNode

CPU_S = 2.0
MEMORY_BYTES = 512 * 2**20
_WAIT_S = 30.0
"""How long an input may take on the clock: on a busy machine, and for what waits for ever."""
_A_CHILD = 500
"""Inputs of one child: whatever it has grown to is freed then."""
_UNREADABLE = ("loop", "zeros", "fifo", "gone", "folder", "dangling", "sparse", "elsewhere")


class Outcome(NamedTuple):
    """What became of one input."""

    seed: int
    target: str
    file: str
    what: str
    """The kind of the change."""
    result: str
    """accepted, the name of our error, or VIOLATION."""
    detail: str = ""


def play(seeds: Sequence[int], targets: Sequence[Target]) -> Iterator[Outcome]:
    """Yield the outcome of each seed."""
    left = list(seeds)
    while left:
        part, left = left[:_A_CHILD], left[_A_CHILD:]
        while part:
            at = 0
            for outcome in _child(part, targets):
                yield outcome
                at += 1
            part = part[at:]


def _child(seeds: Sequence[int], targets: Sequence[Target]) -> Iterator[Outcome]:
    """Yield outcomes of ``seeds`` until the child has played all, or is ended by one; that one's outcome is the last."""
    now = mmap.mmap(-1, 8)
    reads, writes = os.pipe()
    with tempfile.TemporaryDirectory(prefix="springtide-fuzz-", dir=_quick_disk()) as folder:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                os.close(reads)
                _play_all(seeds, targets, Path(folder), now, writes)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writes)
        played = 0
        with os.fdopen(reads) as lines:
            for line in lines:
                played += 1
                yield Outcome(*json.loads(line))
        _, status = os.waitpid(child, 0)
    if played < len(seeds):
        seed = seeds[played]
        target = chosen(Random(seed), targets)
        yield Outcome(seed, target.name, now[:].rstrip(b"\0").decode(), "", "VIOLATION", _end_of(status))


def _end_of(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"the process ended with status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    return {
        signal.SIGPROF: f"more than {CPU_S:g} s of CPU",
        signal.SIGALRM: f"more than {_WAIT_S:g} s",
    }.get(number, f"the process was ended by {signal.Signals(number).name}")


def _quick_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def chosen(random: Random, targets: Sequence[Target]) -> Target:
    """Return the target of a seed's random numbers."""
    return random.choices(targets, [one.share for one in targets])[0]


def _play_all(seeds: Sequence[int], targets: Sequence[Target], folder: Path, now: mmap.mmap, writes: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("FUZZ_STDERR"):
        os.dup2(null, 2)  # what tokenizers' panics print
    os.dup2(null, 1)
    for target in targets:
        target.copy(folder / target.name)
    held = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (held, held))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        outcome = json.dumps(_one(seed, targets, now)).encode() + b"\n"
        os.write(writes, outcome)


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])


def _one(seed: int, targets: Sequence[Target], now: mmap.mmap) -> Outcome:
    random = Random(seed)
    target = chosen(random, targets)
    target.change(random)
    now[:] = bytes(8)
    TOLD.lines.clear()
    result, detail = "accepted", ""
    begin = time.process_time()
    with _limits():
        try:
            target.read(random)
        except BaseException as error:
            result, detail = _judged(error, target)
    if time.process_time() - begin > CPU_S and result != "VIOLATION":
        result, detail = "VIOLATION", f"{time.process_time() - begin:.1f} s of CPU"
    target.restore()
    return Outcome(seed, target.name, target.changed, target.what, result, detail)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """The kernel ends the process that exceeds them: Python's own code may be in a loop of C."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S * 1.25)
    signal.setitimer(signal.ITIMER_REAL, _WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _judged(error: BaseException, target: Target) -> tuple[str, str]:
    """Return the result of an input that was refused, and what is wrong with the refusal."""
    kind = type(error).__name__
    shown = f"{kind}: {str(error)[:400]}"
    if isinstance(error, Violation):
        return "VIOLATION", str(error)[:600]
    is_ours = isinstance(error, SpringtideError) and not isinstance(error, UnfitNode)
    if not is_ours and not (isinstance(error, OSError) and target.what in _UNREADABLE):
        where = traceback.extract_tb(error.__traceback__)[-4:]
        stack = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(where))
        return "VIOLATION", f"{shown} ({stack})"
    if not any(name in str(error) for name in target.names()):
        return "VIOLATION", f"none of {target.names()} is named: {shown}"
    if len(str(error)) > 20_000:
        return "VIOLATION", f"a message of {len(str(error))} characters: {shown}"
    return kind, ""
