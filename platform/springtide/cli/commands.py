"""How commands are declared: each file of this package has ``add(commands)``, which adds its commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Run = Callable[[argparse.Namespace], int]
"""The function of a command; returns the exit status."""


class Commands:
    """One level of the command tree: the top level, or a group such as ``springtide data``."""

    def __init__(self, subparsers: Any, show_all: bool) -> None:
        """``show_all``: show every setting in help texts, as for --help-all."""
        self._subparsers = subparsers
        self.show_all = show_all

    def command(self, name: str, run: Run, help: str, examples: str = "") -> argparse.ArgumentParser:
        """Add a command that calls ``run``; returns its parser."""
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(command=run)
        return parser

    def group(self, name: str, help: str) -> Commands:
        """Add and return a group of commands."""
        parser = self._subparsers.add_parser(name, help=help, description=help)
        return Commands(parser.add_subparsers(required=True, metavar="COMMAND"), self.show_all)
