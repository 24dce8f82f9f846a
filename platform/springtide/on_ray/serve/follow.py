"""The newest committed checkpoint, loaded beside the one that serves.

serving A --newest is B--> loading B beside A --read--> serving B
                                |
                                +--its bytes are bad--> serving A; B is not tried again
                                +--cannot be loaded now--> serving A; B is tried again at the next look
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from springtide.errors import CheckpointError, CorpusError, DamagedFile, StoreUnavailable
from springtide.generation import TextModel

# Ray configures no logger but its own: a line of another is not in a replica's log
_log = logging.getLogger("ray.serve")
_WRITTEN = CheckpointError, CorpusError, DamagedFile
"""Errors of what is in a checkpoint or its dataset."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a server gets its model from; it travels to the replicas."""

    name: str
    """What clients call the model."""
    newest: Callable[[], str]
    """Returns the name of the checkpoint that is to serve."""
    open: Callable[[str], TextModel]
    """Loads a checkpoint."""
    poll_s: float = 0.0
    """Time between two looks for a newer checkpoint; 0: no looks [s]."""


class Served(NamedTuple):
    """A model that answers requests."""

    checkpoint: str
    model: TextModel
    since_s: float
    """When it began to serve, in Unix time [s]."""


class Follower:
    """Holds the model that serves, and replaces it when there is a newer checkpoint."""

    def __init__(self, source: Source) -> None:
        """Load the newest checkpoint; errors are the caller's."""
        self._source = source
        self._bad = ""
        self._ended = threading.Event()
        self.problem = ""
        """Why the newest checkpoint does not serve; empty if it does."""
        name = source.newest()
        self.served = Served(name, source.open(name), time.time())
        """The model that serves. A batch takes it once, and ends with it."""

    def start(self) -> None:
        """Look for newer checkpoints in a thread."""
        if self._source.poll_s:
            threading.Thread(target=self._follow, name="springtide-follow", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def look(self) -> bool:
        """Look for a newer checkpoint, and load it; returns whether it serves from now on."""
        name = ""
        try:
            name = self._source.newest()
            if name in (self.served.checkpoint, self._bad):
                return False
            model = self._source.open(name)
        except Exception as error:  # whatever is wrong with what is new, the old one serves
            self._tell(name, error)
            return False
        self.served, self.problem = Served(name, model, time.time()), ""
        _log.info("%s: %s serves from now on", self._source.name, name)
        return True

    def _tell(self, name: str, error: Exception) -> None:
        what = f"{name} cannot be read" if name else "the run's folder cannot be read"
        problem = f"{what} ({error}); {self.served.checkpoint} goes on serving"
        # what is written stays as it is; a store or memory may come back
        if isinstance(error, _WRITTEN) and not isinstance(error, StoreUnavailable):
            self._bad = name
        if problem != self.problem:
            _log.warning("%s: %s", self._source.name, problem)
        self.problem = problem

    def _follow(self) -> None:
        while not self._ended.wait(self._source.poll_s):
            self.look()
