"""Which checkpoints to keep, and which files nobody needs then. Pure, but for the readers' notes.

Who reads a checkpoint for longer than a moment leaves a note, and nothing that it may need is removed meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from springtide.checkpoint.format import COMMITTED, checkpoints, step_of, term_of
from springtide.store import Folder

_READERS = "readers"
_READER_S = 3600.0
"""A reader that died without taking its note back is forgotten after so long [s]."""


class Rule(NamedTuple):
    """The newest ``last``, those at multiples of ``every`` steps (0: none), and the ``best`` by the smallest ``metric``."""

    last: int
    every: int = 0
    best: int = 0
    metric: str = "loss"


class Found(NamedTuple):
    """A checkpoint's folder as it was found."""

    files: frozenset[str]
    counts: bool
    """Committed, and neither abandoned nor in quarantine."""
    metrics: Mapping[str, float]
    needs: frozenset[str]
    """Every file it is made of, as ``<checkpoint>/<file>``, those of others that it refers to among them."""


def kept(found: Mapping[str, Found], rule: Rule) -> set[str]:
    """Names of the checkpoints to keep, of those that count; where any counts, the newest is among them."""
    names = sorted(name for name, one in found.items() if one.counts)
    keep = set(names[-max(rule.last, 1) :])
    if rule.every:
        keep |= {name for name in names if (step_of(name) or 0) % rule.every == 0}
    ranked = sorted(
        (name for name in names if rule.metric in found[name].metrics),
        key=lambda name: (found[name].metrics[rule.metric], name),
    )
    return keep | set(ranked[: rule.best])


def garbage(found: Mapping[str, Found], rule: Rule, reading: set[str], term: int) -> list[str]:
    """Files, as ``<checkpoint>/<file>``, to remove in this order: commit markers before what they vouch for.

    ``reading``: checkpoints that somebody reads. ``term``: of the writer who asks; what newer ones have written is left
    alone, and so is all that is newer than the newest checkpoint that counts. One in quarantine or abandoned goes when as many
    newer ones count as the rule keeps.
    """
    keep = kept(found, rule)
    if not keep:
        return []
    newest, oldest_of_last = (
        max(keep),
        sorted(name for name, one in found.items() if one.counts)[-max(rule.last, 1) :][0],
    )
    not_yet = {name for name, one in found.items() if not one.counts and name > oldest_of_last}
    stay = keep | not_yet | (reading & found.keys())
    needed = frozenset().union(*(found[name].needs for name in stay))
    doomed = []
    for name, one in found.items():
        if name > newest or name in reading or name in not_yet:
            continue
        # of one that stays only what a killed or slower lease left there
        files = [file for file in one.files if name not in keep or term_of(file) is not None]
        of_marks = max((term_of(file) or 0 for file in one.files), default=0)  # a mark's name does not say whose it is
        doomed += [
            f"{name}/{file}" for file in files if f"{name}/{file}" not in needed and (term_of(file) or of_marks) <= term
        ]
    return sorted(doomed, key=lambda whole: (not whole.endswith(f"/{COMMITTED}"), whole))


@contextlib.contextmanager
def note_reader(run: Folder, name: str) -> Iterator[None]:
    """Nothing of checkpoint ``name`` is removed while the block runs, for up to an hour. Where no note can be left the block
    runs without."""
    note = f"{_READERS}/{name}.{uuid.uuid4().hex[:12]}"
    folder = checkpoints(run)
    with contextlib.suppress(OSError):
        folder.write(note, json.dumps({"until_s": time.time() + _READER_S}))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.remove(note)


def hold(run: Folder, name: str, who: str) -> None:
    """Have checkpoint ``name`` kept for good, for ``who``; OSError when that cannot be noted."""
    checkpoints(run).write(f"{_READERS}/{name}.{who}", json.dumps({"until_s": math.inf}))


def being_read(run: Folder) -> set[str]:
    """Checkpoints that readers have notes for; notes that have run out are removed."""
    found = set()
    folder = checkpoints(run)
    for note in (folder / _READERS).names():
        with contextlib.suppress(OSError, ValueError, KeyError):
            if folder.read_json(f"{_READERS}/{note}")["until_s"] > time.time():
                found.add(note.split(".", 1)[0])
            else:
                folder.remove(f"{_READERS}/{note}")
    return found
