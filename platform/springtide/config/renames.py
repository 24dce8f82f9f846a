"""Names of settings and commands that are retired or renamed, and what answers them: the one table.

A config that a user gives now is refused by name, with what to use instead. A config in a run's folder is read through this
table: a renamed setting is read under its new name, and a retired one is dropped. It is refused only if the setting changed the
training and was not at its default. docs/decisions/renames.md lists the same for people.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Retired:
    """A setting that is gone."""

    default: Any
    """Its default, at which the training is today's."""
    instead: str
    """What to use instead: the remedy of the error, such as ``prepare the new text, then resume with it in stream.mixture``."""
    changes_training: bool = False
    """Whether another value changed what was learned, so that a run that has it cannot be resumed by this version."""
    is_free: bool = True
    """Whether it was free, and so never part of a run's identity."""


RETIRED_SETTINGS: dict[str, Retired] = {}
"""Dotted name -> what it was."""

RENAMED_SETTINGS: dict[str, str] = {}
"""Old dotted name -> new dotted name. A run's identity hashes the old one."""

RETIRED_COMMANDS: dict[str, str] = {
    "run why": "springtide run status RUN",
    "run watch": "springtide run status RUN --follow",
    "run note": "a file of your own beside the run, or the description of its MLflow run",
    "run list --out": "springtide run list ROOT, with --json for a page of your own",
    "report --serve": "reload RUN/report.html, which is written anew while a run trains; or springtide run status RUN --follow",
    "report --port": "reload RUN/report.html, which is written anew while a run trains; or springtide run status RUN --follow",
}
"""A command, such as ``model serve``, or one with an option, such as ``run watch --page`` -> what to use instead."""
