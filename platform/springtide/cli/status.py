"""Exit statuses: one table for all commands, and for jobs, which are commands."""

from __future__ import annotations

import enum
from typing import Any

from springtide.errors import CommandFailed, RunExists, SpringtideError, StoreLost, StoreUnavailable


class Status(enum.IntEnum):
    """What a command tells whoever started it. A supervisor that tries again does so for UNREACHABLE, and for FAILED a few
    times; the same command would end in BAD_INPUT and REFUSED again."""

    def __new__(cls, number: int, meaning: str) -> Any:
        """Members are numbers; ``meaning`` is for people."""
        one = int.__new__(cls, number)
        one._value_ = number
        one.__doc__ = meaning
        return one

    DONE = (
        0,
        "Done. Also asked to stop: `train` and the trials of `sweep` have saved; the last line says how to continue.",
    )
    FAILED = 1, "The work failed: training raised an error, a check did not hold, a checkpoint or a dataset is damaged."
    BAD_INPUT = 2, "A setting, an argument or an input cannot work; nothing was started."
    REFUSED = (
        3,
        "The run exists already or another driver holds it; or a run refused a command, or did not answer in time.",
    )
    UNREACHABLE = 4, "A file, the store or the cluster could not be read or written."
    INTERRUPTED = 130, "Interrupted at once, by a second Ctrl-C or SIGTERM, or where there was nothing to save."


def status_of(error: BaseException) -> Status:
    """Return the exit status of a command that ends with ``error``.

    >>> from springtide.errors import ConfigError
    >>> status_of(ConfigError("")).name, status_of(OSError("503 Slow Down")).name, status_of(KeyboardInterrupt()).name
    ('BAD_INPUT', 'UNREACHABLE', 'INTERRUPTED')
    """
    match error:
        case KeyboardInterrupt():
            return Status.INTERRUPTED
        case RunExists() | CommandFailed():
            return Status.REFUSED
        case ValueError():  # ConfigError, CorpusError and DamagedFile are some
            return Status.BAD_INPUT
        case StoreUnavailable() | StoreLost():
            return Status.UNREACHABLE
        case SpringtideError():
            return Status.FAILED
        case OSError():
            return Status.UNREACHABLE
    return Status.FAILED
