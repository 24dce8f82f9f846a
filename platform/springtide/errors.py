"""Error classes of the package. Each message names what happened, the value, the limit and the remedy.

A retry does not fix these errors. A transient failure (a lost node, a dropped connection) keeps its original exception, and Ray
retries. Ray sends errors between processes, so each error must pickle: the message is the only argument.

Passwords in URLs are never printed, logged or sent: ``redacted`` removes them.

Examples:
    >>> try:
    ...     st.open_run("runs/no-such-run")
    ... except st.ConfigError as error:
    ...     print(error)
    run = 'runs/no-such-run': is not a run's folder: it has no config.yaml; give <root>/<run id>
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")
_PASSWORD = re.compile(r"(?P<before>://[^\s:/?#@]*:)(?:[^\s/?#]*|(?!\d*[/?#])[^\s@'\"]{1,128}+)(?=@)")
"""Matches ``://user:password`` before an @. The password may contain an unquoted @. Up to the first @ it may also contain / ?
#, unless the text looks like a port and a path: digits, then / ? or #. The pattern does not match the URL scheme, because that
would take quadratic time."""
_TOKEN_AS_USER = re.compile(r"(?P<before>https?://)[^\s:/?#@*]+(?=@)", re.IGNORECASE)
"""Matches the user in https://TOKEN@host, because git hosts accept a token there. In other schemes the user is no secret:
abfs://container@account."""
_SECRET_NAMES = (
    *("token", "secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials"),
    *("signature", "sig", "sas", "jwt", "auth", "authorization", "bearer", "code", "assertion"),
    *("key", "apikey", "accountkey", "accesskey", "awsaccesskeyid", "sharedaccesssignature"),
)
"""Last words in names of secret URL parameters, such as client_secret, x-amz-security-token, refresh_token and api-key."""
_SECRET = re.compile(
    rf"(?P<before>[?&;#](?:[\w.-]{{0,64}}[_.-])?(?:{'|'.join(_SECRET_NAMES)})=)[^\s&;#'\"]+", re.IGNORECASE
)
HIDDEN = "***"


class _Short(reprlib.Repr):
    """Shortens values for messages, because the text of a value from a hostile file may be larger than memory."""

    def repr_int(self, x: int, level: int) -> str:
        """Return a number as text, or its size if it is too long. Python refuses to print more than 4,300 digits, but YAML can
        contain larger numbers (in hex)."""
        return super().repr_int(x, level) if x.bit_length() <= _MOST_BITS else f"a number of {x.bit_length():,} bits"


_MOST_BITS = 4096
_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 1000
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
_SHORT.maxlevel = 4
_MOST_SHOWN = 2000
"""Most characters of a value in a message: aliases in YAML can expand a short file to a long value."""
_LINE = 300
"""Most characters of an error's message that ``in_one_line`` returns."""
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, which could control a terminal, except newline and tab
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"  # characters that are invisible, or reverse text
    "\ud800-\udfff\ufffe\uffff]"  # not allowed in UTF-8 or XML; Python uses some for bytes of file names that are not UTF-8
)
"""Characters that ``printable`` replaces. It keeps the joiners and variation selectors of emoji, and of Indic and Mongolian
scripts."""


class SpringtideError(Exception):
    """Base of all errors of this package."""


class ConfigError(SpringtideError, ValueError):
    """A setting, argument or input cannot work. Raised before the work starts."""


class CorpusError(SpringtideError, ValueError):
    """A corpus (source text), the dataset made from it, or its labels cannot be used: missing, damaged, empty or too small."""


class CorruptShard(SpringtideError):
    """A shard (file of a dataset) has other bytes than were written."""


class DamagedFile(SpringtideError, ValueError):
    """A small file of a run or a sweep, such as a manifest, has contents that this version of the package never writes."""


class OrderError(SpringtideError):
    """A sample or a checkpoint does not fit the run's data order, which determines the samples of each step."""


class CheckpointError(SpringtideError):
    """A checkpoint cannot be written or read."""


class StoreUnavailable(CheckpointError):
    """A checkpoint that training waits for was not saved, because its storage cannot be reached for now. A process that has the
    state in memory may retry."""


class DiskFull(StoreUnavailable):
    """A checkpoint that training waits for was not saved, because the disk is full. A retry would not help, so the run ends.
    After somebody has freed disk space, the run can resume from its newest checkpoint."""


class UnfitNode(SpringtideError):
    """A node is not fit to train: it reads or computes other bytes than its peers, or does not find the lease file by which the
    driver claims the run. The run continues without the node. Arguments: the message, and the node's name if it is known."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message, node)
        self.node = node

    def __str__(self) -> str:
        return str(self.args[0])


class RunExists(SpringtideError):
    """A run with this id exists already and no resume is requested, or another process holds the right to write the run."""


class LeaseOvertaken(RunExists):
    """A worker group hung and now continues, but its lease (right to write the run) was replaced meanwhile: the snapshot
    servers, which keep copies of its state in memory, saved the state under a newer lease. This group must not save any more; a
    new group resumes from the saved state."""


class TrainingFailed(SpringtideError):
    """Training stopped on an error in the training code; the message has the rank and the stack trace."""


class TrainingInterrupted(TrainingFailed):
    """Training stopped because something outside of it is missing: a process on the driver's node, capacity, a store. The run
    can resume from the state that it has saved."""


class StoreLost(TrainingInterrupted):
    """Training stopped because a store (checkpoint storage) could not be reached in any retry. Later the run can resume."""


class CommandFailed(SpringtideError):
    """A command to a run, such as a pause, was refused, failed, or was not carried out."""


class StoppedWaiting(SpringtideError):
    """Training was asked to stop while it waited for capacity; handled like any other requested stop."""


def look_up(table: Mapping[str, _T], field: str, value: str) -> _T:
    """Return the entry of ``table`` for the value of the setting ``field``. Raises ConfigError if the table does not list the
    value: there is no default, because an unknown value must not run the code of another value.

    >>> look_up({"relu": max}, "model.activation", "tanh")
    Traceback (most recent call last):
    springtide.errors.ConfigError: model.activation = 'tanh': is not in the table of what is built in; use one of relu
    """
    if value not in table:
        raise ConfigError(
            explain(field, value, "is not in the table of what is built in", f"use one of {', '.join(table)}")
        )
    return table[value]


def explain(field: str, value: object, limit: str, remedy: str) -> str:
    """Return an error message of the form ``field = value: limit; remedy``, redacted and printable.

    >>> explain("train.total", 0, "trains on nothing", "give at least one token")
    'train.total = 0: trains on nothing; give at least one token'
    """
    return printable(redacted(f"{field} = {_cut(_SHORT.repr(value))}: {_cut(limit)}; {remedy}"))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def damaged(file: str, what: str) -> DamagedFile:
    """Return the error for a damaged ``file``, redacted and printable.

    >>> damaged("runs/a/leases/0001.json", "its owner is None")
    DamagedFile('runs/a/leases/0001.json: its owner is None; restore the file from a copy, or remove it')
    """
    return DamagedFile(printable(redacted(f"{file}: {_cut(what)}; restore the file from a copy, or remove it")))


def in_one_line(error: BaseException) -> str:
    """Return an error's message, redacted and printable, in one line of at most 300 characters.

    >>> in_one_line(ConfigError("a = 1: is wrong; use 2\\n  b = 1: is wrong; use 2"))
    'a = 1: is wrong; use 2 b = 1: is wrong; use 2'
    """
    text = printable(redacted(" ".join(str(error).split()) or type(error).__name__))
    return text if len(text) <= _LINE else f"{text[:_LINE]} ..."


def redacted(text: str) -> str:
    """Return ``text`` without the passwords, tokens and signatures in its URLs.

    >>> redacted("postgresql://ml:hunter2@db/mlflow")
    'postgresql://ml:***@db/mlflow'
    """
    for pattern in (_PASSWORD, _TOKEN_AS_USER, _SECRET):
        text = pattern.sub(rf"\g<before>{HIDDEN}", text)
    return text


def printable(text: str) -> str:
    """Return ``text`` with U+FFFD in place of each character that controls a terminal, or that HTML or a log cannot hold. All
    untrusted text goes through this function before it is printed.

    >>> printable("red: \\x1b[31m")
    'red: \ufffd[31m'
    """
    return _UNPRINTABLE.sub("\ufffd", text)
