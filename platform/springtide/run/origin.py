"""The origin of a run: command and git commit. Each start of training on Ray writes it to ``origin.json`` in the run folder."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field, TypeAdapter

from springtide.storage import Folder

ORIGIN = "origin.json"
_Text = Annotated[str, Field(max_length=20_000)]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Command and git checkout of a run's newest start."""

    command: _Text = ""
    """The command line, without secrets."""
    commit: _Text = ""
    """Git commit that was checked out in the working directory of the command; empty if that is no git checkout."""
    branch: _Text = ""
    """Name of the git branch; empty without a commit, and for a detached HEAD, as in many CI systems."""
    repository: _Text = ""
    """URL of the git remote ``origin``."""
    is_changed: bool = False
    """True if files of the checkout had changes that were not committed."""

    @property
    def source(self) -> str:
        """Git commit, branch and repository as one line of text; empty if no commit is known."""
        if not self.commit:
            return ""
        of = f" of {self.repository}" if self.repository else ""
        branch = f", branch {self.branch}" if self.branch else ""
        return f"{self.commit[:12]}{branch}{of}{', with uncommitted changes' if self.is_changed else ''}"


_ORIGIN = TypeAdapter(Origin)


def write_origin(run: Folder, origin: Origin) -> None:
    """Write ``origin`` into a run's folder."""
    run.write_json(ORIGIN, dataclasses.asdict(origin))


def read_origin(run: Folder) -> Origin:
    """Return the origin that the run's newest start wrote; an empty ``Origin`` if there is none. Raises DamagedFile."""
    return run.read_as(ORIGIN, _ORIGIN) if run.exists(ORIGIN) else Origin()
