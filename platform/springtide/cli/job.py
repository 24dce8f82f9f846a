"""Run commands as Ray jobs: each file of the folder jobs/ runs one command.

A Ray job runs in a copy of the submitted folder, on a node of the cluster, with the version of springtide on that node.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import springtide
from springtide.cli.main import complain, main
from springtide.errors import ConfigError, explain


def job(*command: str) -> int:
    """Run a command with the arguments of this process. The files of jobs/ call it.

    Args:
        command: words of the command, such as ``"data", "prepare"``. ``sys.argv`` is set to ``springtide``, these words and the
            arguments, because a run's folder records it.

    Returns:
        The exit status: see ``springtide.cli.commands``.
    """
    file, *options = sys.argv
    sys.argv = ["springtide", *command, *options]
    try:
        check_sent(Path(file).resolve().parents[1])
    except ConfigError as error:
        return complain(error)
    return main(sys.argv[1:])


def check_sent(folder: Path) -> None:
    """Raise ConfigError if the submitted folder has another version of springtide than this process runs: the command's options
    were written for the folder's version. A folder without a version is accepted.

    Args:
        folder: the submitted folder, with the ``jobs`` and perhaps the ``pyproject.toml`` of a checkout.
    """
    try:
        sent = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    except (OSError, ValueError, KeyError):
        return
    here = springtide.__version__
    if isinstance(sent, dict) and sent.get("name") == "springtide" and sent.get("version") != here:
        limit = f"is the version of the folder that was submitted, and {sys.executable} on the cluster has {here}"
        remedy = f"submit a checkout of v{here}, or install the folder's version on all nodes (docs/how-to/cloud.md)"
        raise ConfigError(explain("springtide", sent.get("version"), limit, remedy))
