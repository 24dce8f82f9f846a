"""The state of a run as a word (such as ``training``), derived from its events. Run handles, lists of runs, HTML reports and
``springtide run status`` use it."""

from __future__ import annotations

from collections.abc import Iterable

from springtide.events import Commanded, Decided, Event, Started, StepDone, Stopped

UNKNOWN = "running or killed"
"""State of a run whose journal records no end. The journal alone does not show if the run's driver is still alive."""


class RunState:
    """The state of a run, updated event by event, oldest first.

    Examples:
        >>> from springtide.tracking.run_state import RunState
        >>> state = RunState()
        >>> for event in st.open_run("runs/mine").events:
        ...     state.add(event)
        >>> state.word, state.is_over, state.describe()
        ('finished', True, 'finished at step 8')
    """

    def __init__(self) -> None:
        self.word = "not started"
        """``not started``, ``starting``, ``training``, ``paused``, ``waiting``, ``finished``, ``stopped`` or ``failed``."""
        self.trains = False
        """True from the start of a worker group until the run pauses, waits for nodes or ends."""
        self._stopped: Stopped | None = None
        self._stopped_by = ""
        """User who gave the last command to stop the run; empty if no user has stopped it."""

    def add(self, event: Event) -> None:
        """Update the state with the next event of the run."""
        if self._stopped is not None and self._is_later(event, self._stopped):
            self._stopped, self._stopped_by, self.word = None, "", "starting"  # a new driver has resumed the run
        match event:
            case Stopped():
                self._stopped, self.word, self.trains = event, event.status, False
            case Commanded(verb="stop", refused=False):
                self._stopped_by = event.caller
            case _ if self._stopped is not None:
                pass
            case StepDone():
                self.word, self.trains = "training", True
            case Started():
                self.word, self.trains = "starting", True
            case Decided(decision="stay") if event.is_about_pause:
                self.word, self.trains = "paused", False
            case Decided(decision="stay") if "waiting" in event.reason:
                self.word, self.trains = "waiting", False
            case Decided(decision="start") if not self.trains:
                self.word = "starting"

    @staticmethod
    def _is_later(event: Event, stopped: Stopped) -> bool:
        return event.term > stopped.term or (isinstance(event, Started) and event.time_s > stopped.time_s)

    @property
    def is_over(self) -> bool:
        """True if a driver has recorded the end of training, and no driver has started since."""
        return self._stopped is not None

    @property
    def known(self) -> str:
        """The state ``word``, but ``running or killed`` in place of ``starting`` and ``training``: a killed driver records no
        end, so the events alone do not show if the run still trains."""
        return UNKNOWN if self.word in ("starting", "training") else self.word

    def describe(self) -> str:
        """Return the state ``known`` as text. If the run has ended, the text also names the last step, the reason, and the user
        who stopped it."""
        if self._stopped is None:
            return self.known
        by = f", by {self._stopped_by}" if self._stopped_by and self._stopped.status == "stopped" else ""
        why = f": {self._stopped.reason}" if self._stopped.reason else ""
        return f"{self.word} at step {self._stopped.step:,}{by}{why}"


def run_state(events: Iterable[Event]) -> RunState:
    """Return the state of a run after ``events``.

    Args:
        events: events of a run, oldest first. Step events may be left out: then a run that trains is ``starting``.

    Examples:
        >>> from springtide.tracking.run_state import run_state
        >>> run_state(st.open_run("runs/mine").events).known
        'finished'
    """
    state = RunState()
    for event in events:
        state.add(event)
    return state
