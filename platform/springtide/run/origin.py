"""Where a run came from: ``origin.json`` in its folder, which each start on Ray writes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field, TypeAdapter

from springtide.storage import Folder

ORIGIN = "origin.json"
_Text = Annotated[str, Field(max_length=20_000)]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The newest start of a run."""

    command: _Text = ""
    """Without secrets."""
    commit: _Text = ""
    """The git checkout that it ran in; empty without one."""
    branch: _Text = ""
    repository: _Text = ""
    """URL of the remote ``origin``."""
    is_changed: bool = False
    """Whether files of the checkout differed from the commit."""

    @property
    def source(self) -> str:
        """The commit and where it is, as text; empty without one."""
        if not self.commit:
            return ""
        of = f" of {self.repository}" if self.repository else ""
        return f"{self.commit[:12]}, branch {self.branch}{of}" + (
            ", with uncommitted changes" if self.is_changed else ""
        )


_ORIGIN = TypeAdapter(Origin)


def write_origin(run: Folder, origin: Origin) -> None:
    """Write it into a run's folder."""
    run.write_json(ORIGIN, dataclasses.asdict(origin))


def read_origin(run: Folder) -> Origin:
    """Return what the run's newest start wrote; empty if none did. Raises DamagedFile."""
    return run.read_as(ORIGIN, _ORIGIN) if run.exists(ORIGIN) else Origin()
