"""Errors that say what happened, the value, the limit and the remedy.

Trying again helps none of them; what may pass by itself (a lost node, a dropped connection) is left as the exception it came
as, and Ray tries again. They cross process boundaries inside Ray, so every one pickles: the message is the only argument.

Nothing that is shown, logged or sent holds a password: ``redacted`` takes it out of URLs.
"""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^\s:/?#@]*:)[^\s/?#]*(?=@)", re.IGNORECASE)
"""``scheme://user:password@``; a password may have an @ that nobody has quoted."""
_TOKEN_AS_USER = re.compile(r"(?P<before>https?://)[^\s:/?#@*]+(?=@)", re.IGNORECASE)
"""As git hosts take it. Elsewhere the user is no secret: abfs://container@account."""
_SECRET_NAMES = (
    *("x-amz-signature", "x-amz-credential", "x-amz-security-token", "x-goog-signature", "x-goog-credential"),
    *("awsaccesskeyid", "signature", "sig", "token", "access_token", "password", "passwd", "pwd", "secret"),
    *("api_key", "api-key", "apikey", "key", "accountkey", "sharedaccesssignature"),
)
_SECRET = re.compile(rf"(?P<before>[?&;](?:{'|'.join(_SECRET_NAMES)})=)[^\s&;#'\"]+", re.IGNORECASE)
HIDDEN = "***"


class SpringtideError(Exception):
    """Base of all errors of this package."""


class ConfigError(SpringtideError, ValueError):
    """A setting that cannot work, found before anything starts."""


class CorpusError(SpringtideError, ValueError):
    """A corpus that is missing, empty or too small for what is asked of it."""


class CorruptShard(SpringtideError):
    """A shard whose bytes are not those that were sealed."""


class OrderError(SpringtideError):
    """A sample arrived that the order did not ask for, or a checkpoint belongs to another order."""


class CheckpointError(SpringtideError):
    """A checkpoint that cannot be written or read."""


class UnfitNode(SpringtideError):
    """A node reads other bytes than its peers. Arguments: the message, and the node's name where it is known. The run goes on
    without the node."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message, node)
        self.node = node

    def __str__(self) -> str:
        return str(self.args[0])


class RunExists(SpringtideError):
    """The run id is taken: resuming must be asked for."""


class TrainingFailed(SpringtideError):
    """Training stopped on an error of the training code; the message has rank and trace."""


class StoppedWaiting(SpringtideError):
    """Training was asked to stop while it waited for capacity: an end like any other that was asked for."""


def explain(field: str, value: object, limit: str, remedy: str) -> str:
    """One sentence in the house's form: ``field = value: limit; remedy``."""
    return redacted(f"{field} = {value!r}: {limit}; {remedy}")


def redacted(text: str) -> str:
    """``text`` without the passwords, tokens and signatures of URLs in it.

    >>> redacted("postgresql://ml:hunter2@db/mlflow")
    'postgresql://ml:***@db/mlflow'
    """
    for pattern in (_PASSWORD, _TOKEN_AS_USER, _SECRET):
        text = pattern.sub(rf"\g<before>{HIDDEN}", text)
    return text
