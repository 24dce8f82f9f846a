"""The state of a run as a word (such as ``training``), derived from its events. Run handles, lists of runs, HTML reports and
``springtide run status`` use it."""

from __future__ import annotations

from collections.abc import Iterable

from springtide.events import Commanded, Decided, Event, Started, StepDone, Stopped

UNKNOWN = "running or killed"
"""State of a run without a recorded end: its journal alone does not show whether its driver is alive."""


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
        """True if a worker group has started, and the run has not paused, waited or stopped since."""
        self._stopped: Stopped | None = None
        self._stopped_by = ""
        """User who gave the last command to stop the run; empty without such a command."""

    def add(self, event: Event) -> None:
        """Update the state with the next event of the run."""
        if self._stopped is not None and self._is_later(event, self._stopped):
            self._stopped, self._stopped_by, self.word = None, "", "starting"  # a new driver begins or resumes the run
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
        """The state ``word``, if the events alone prove it; else ``running or killed``, because a killed driver records no
        end."""
        return UNKNOWN if self.word in ("starting", "training") else self.word

    def describe(self) -> str:
        """Return the state ``known`` as text. For a run that has ended, add at which step, by whose command, and why it
        ended."""
        if self._stopped is None:
            return self.known
        by = f", by {self._stopped_by}" if self._stopped_by and self._stopped.status == "stopped" else ""
        why = f": {self._stopped.reason}" if self._stopped.reason else ""
        return f"{self.word} at step {self._stopped.step:,}{by}{why}"


def run_state(events: Iterable[Event]) -> RunState:
    """Return the state of a run after ``events``.

    Args:
        events: events of a run, oldest first; steps may be left out.

    Examples:
        >>> from springtide.tracking.run_state import run_state
        >>> run_state(st.open_run("runs/mine").events).known
        'finished'
    """
    state = RunState()
    for event in events:
        state.add(event)
    return state
