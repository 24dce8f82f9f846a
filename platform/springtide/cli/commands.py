"""How commands are declared: each file of this package has ``add(commands)``, which adds its commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from springtide.errors import ConfigError

Run = Callable[[argparse.Namespace], int]
"""The function of a command; returns the exit status."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It adds its options when it is used: one command is run, and each has two hundred options."""

    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds them."""
    words: Sequence[str] = ()
    """The whole command line after ``springtide``."""

    def error(self, message: str) -> NoReturn:
        """As argparse, but ConfigError with what replaces it for a retired command or option."""
        check_retired(self.words)
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse."""
        self._add_options()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """As argparse."""
        self._add_options()
        return super().format_help()

    def _add_options(self) -> None:
        options, self.options = self.options, None
        if options:
            options(self)


class Commands:
    """One level of the command tree: the top level, or a group such as ``springtide data``."""

    def __init__(self, parser: CommandParser, show_all: bool) -> None:
        """``show_all``: show every setting in help texts, as for --help-all."""
        self._words = parser.words
        self._subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
        self.show_all = show_all

    def command(
        self,
        name: str,
        run: Run,
        help: str,
        options: Callable[[argparse.ArgumentParser], None],
        examples: str = "",
    ) -> None:
        """Add a command that calls ``run``; ``options`` adds its options to its parser."""
        parser = self._subparsers.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(command=run)
        parser.options, parser.words = options, self._words

    def group(self, name: str, help: str) -> Commands:
        """Add and return a group of commands."""
        parser = self._subparsers.add_parser(name, help=help, description=help)
        parser.words = self._words
        return Commands(parser, self.show_all)


def check_retired(words: Sequence[str]) -> None:
    """Raise ConfigError, which says what to use instead, if the words of a command line name a retired command or option."""
    from springtide.config.renames import replaces_command  # most commands need no config, which takes long to import

    if problem := replaces_command(words):
        raise ConfigError(problem)
