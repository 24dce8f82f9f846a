"""Choose the checkpoints to keep and the files to remove. All functions are pure, except the functions for reader notes.

A process that reads a checkpoint writes a reader note, a small file. The checkpoint's files are protected from deletion until
the note is removed or expires.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import TypeAdapter

from springtide.checkpoint.format import COMMITTED, checkpoints, step_of, term_of
from springtide.config.schema import CheckpointConfig
from springtide.errors import DamagedFile
from springtide.storage import Folder, to_json

_OURS = re.compile(r"COMMITTED|ABANDONED|QUARANTINED|a\d{4,}-(manifest\.json|r\d{4,}\.(json|safetensors))")
"""Names of the files that this package writes to a checkpoint's folder. Other files there are never removed."""
_READERS = "readers"
_READER_S = 3600.0
"""A reader note expires after this time, because a reader may die without removing its note; a live reader renews it [s]."""


class _ReaderNote(NamedTuple):
    until_s: float | None


_NOTE = TypeAdapter(_ReaderNote)
_log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """Keep the newest ``last`` checkpoints, all checkpoints at multiples of ``every`` steps (0 turns this off), and the
    ``best`` (a number) checkpoints with the lowest ``metric``."""

    last: int
    every: int = 0
    best: int = 0
    metric: str = "loss"

    @classmethod
    def of(cls, config: CheckpointConfig) -> Rule:
        """Return the rule for keeping checkpoints that a run's config sets."""
        return cls(config.keep_last, config.keep_every, config.keep_best, config.best_by)


class Found(NamedTuple):
    """Facts about a checkpoint, from which ``kept`` and ``garbage`` decide whether it is kept."""

    files: frozenset[str]
    counts: bool
    """True if the checkpoint is usable: committed, and neither abandoned nor quarantined."""
    metrics: Mapping[str, float]
    needs: frozenset[str]
    """All files that the checkpoint needs, as ``<checkpoint>/<file>``, including those in older checkpoints."""
    agreed_step: int | None = None
    """Last step before this save at which all devices were found to compute the same results; None if devices were never
    compared."""


def kept(found: Mapping[str, Found], rule: Rule) -> set[str]:
    """Return the names of the usable checkpoints to keep (committed, not abandoned, not quarantined). The newest checkpoint is
    always kept. If devices are compared, one more is kept: the newest checkpoint up to the step at which all devices last
    computed the same results. Later checkpoints may have to be abandoned."""
    names = sorted(name for name, one in found.items() if one.counts)
    keep = set(names[-max(rule.last, 1) :])
    if rule.every:
        keep |= {name for name in names if (step_of(name) or 0) % rule.every == 0}
    agreements = [step for name in names if (step := found[name].agreed_step) is not None]
    keep |= set([name for name in names if agreements and (step_of(name) or 0) <= max(agreements)][-1:])
    ranked = sorted(
        (name for name in names if rule.metric in found[name].metrics),
        key=lambda name: (found[name].metrics[rule.metric], name),
    )
    return keep | set(ranked[: rule.best])


def garbage(found: Mapping[str, Found], rule: Rule, reading: set[str], term: int) -> list[str]:
    """Return the files to remove, as ``<checkpoint>/<file>``, all commit markers before all other files.

    ``reading``: names of checkpoints with a reader note. ``term``: number of the writer's lease. Three kinds of files are never
    removed: files of newer leases, files of checkpoints newer than the newest usable checkpoint, and files that this package
    does not write. A quarantined or abandoned checkpoint is removed once there are ``rule.last`` newer usable checkpoints.
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
        # in a kept checkpoint, remove only unneeded files that a killed or slower writer left, never markers like COMMITTED
        files = [
            file for file in one.files if _OURS.fullmatch(file) and (name not in keep or term_of(file) is not None)
        ]
        # a marker has no lease number in its name: use the highest lease number of the checkpoint's other files
        of_marks = max((term_of(file) or 0 for file in one.files), default=0)
        doomed += [
            f"{name}/{file}" for file in files if f"{name}/{file}" not in needed and (term_of(file) or of_marks) <= term
        ]
    return sorted(doomed, key=lambda whole: (not whole.endswith(f"/{COMMITTED}"), whole))


@contextlib.contextmanager
def note_reader(run: Folder, name: str) -> Iterator[None]:
    """Protect the files of checkpoint ``name`` from deletion during the ``with`` block, with a reader note.

    If the note cannot be written, the block runs without it. If this process is killed, the note expires. Raises ConfigError if
    the folder of notes is a link out of the run: an untrusted run may contain such a link.
    """
    note = f"{_READERS}/{name}.{uuid.uuid4().hex[:12]}"
    folder, is_over = checkpoints(run).confined(), threading.Event()

    def renew() -> None:
        while not is_over.wait(_READER_S / 4):
            write()

    def write() -> None:
        with contextlib.suppress(OSError):
            folder.write(note, to_json({"until_s": time.time() + _READER_S}))

    write()
    thread = threading.Thread(target=renew, name="springtide-reader-note", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # otherwise the thread could write the note again after its removal
        with contextlib.suppress(OSError):
            folder.remove(note)


def hold(run: Folder, name: str, who: str) -> None:
    """Protect checkpoint ``name`` from deletion until ``release``, with a note that does not expire. ``who``: id of the run
    that starts from the checkpoint. Raises OSError if the note cannot be written, ConfigError if the folder of notes is a link
    out of the run."""
    checkpoints(run).confined().write(f"{_READERS}/{name}.{who}", to_json({"until_s": None}))


def release(run: Folder, name: str, who: str) -> None:
    """Remove the note that ``hold`` wrote for the run ``who``."""
    checkpoints(run).remove(f"{_READERS}/{name}.{who}")


def being_read(run: Folder) -> set[str]:
    """Return the checkpoints with reader notes; remove expired notes. A damaged note counts as valid: its reader may be
    alive."""
    found = set()
    folder = checkpoints(run)
    for note in (folder / _READERS).names():
        try:
            ends_s = folder.read_as(f"{_READERS}/{note}", _NOTE).until_s
            until_s = math.inf if ends_s is None else ends_s
        except DamagedFile as error:
            _tell(str(error))
            until_s = math.inf
        except OSError:  # the reader has removed its note since it was listed
            continue
        if until_s > time.time():
            found.add(note.split(".", 1)[0])
            continue
        with contextlib.suppress(OSError):
            folder.remove(f"{_READERS}/{note}")
    return found


@functools.cache
def _tell(problem: str) -> None:
    """Log once that a reader note is damaged."""
    _log.warning("%s; the checkpoint that this reader note names is kept", problem)
