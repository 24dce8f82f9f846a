"""Declare commands: each file of this package has a function ``add(commands)``, which adds the commands of the file."""

from __future__ import annotations

import argparse
import difflib
import enum
from collections.abc import Callable, Sequence
from typing import Any

from springtide.errors import (
    CommandFailed,
    ConfigError,
    RunExists,
    SpringtideError,
    StoreLost,
    StoreUnavailable,
    explain,
)

Run = Callable[[argparse.Namespace], int]
"""The function that runs a command with the parsed options; returns the exit status."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It adds its options only when it is used, because a command may have two hundred options."""

    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Function that adds the command's options to the parser."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, after adding the command's options."""
        self._add_options()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Format the help like argparse, after adding the command's options."""
        self._add_options()
        return super().format_help()

    def _add_options(self) -> None:
        options, self.options = self.options, None
        if options:
            options(self)


class Commands:
    """One level of the command tree: the top level, or a group such as ``springtide data``."""

    def __init__(self, parser: argparse.ArgumentParser, show_all: bool) -> None:
        """``show_all``: show every setting in help texts, as for --help-all."""
        self._groups: dict[str, Commands] = {}
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
        """Add a command that calls ``run``. ``options``: a function that adds the command's options to a parser."""
        parser = self._subparsers.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(command=run)
        parser.options = options

    def group(self, name: str, help: str) -> Commands:
        """Add and return a group of commands."""
        found = Commands(self._subparsers.add_parser(name, help=help, description=help), self.show_all)
        self._groups[name] = found
        return found

    def check(self, words: Sequence[str], before: str = "") -> None:
        """Raise ConfigError, which suggests the nearest command, if the first of ``words`` is not a command of this level.
        ``before``: name of the group and a space, such as ``run ``, for the message; empty at the top level."""
        if not words or words[0].startswith("-"):
            return
        word, known = words[0], list(self._subparsers.choices)
        if word in self._groups:
            self._groups[word].check(words[1:], f"{before}{word} ")
        elif word not in known:
            inside = [f"{name} {one}" for name, group in self._groups.items() for one in group._subparsers.choices]
            same = [name for name in inside if name.split()[1] == word]
            close = same or difflib.get_close_matches(word, [*known, *inside], n=1)
            remedy = f"did you mean springtide {before}{close[0]}?" if close else f"see springtide {before}--help"
            raise ConfigError(explain("command", f"{before}{word}", f"is not one of {', '.join(known)}", remedy))


# Exit statuses: one table for all commands, also for commands that run as Ray jobs.


class Status(enum.IntEnum):
    """Exit status of a command. A supervisor should retry after UNREACHABLE, and a few times after FAILED. After BAD_INPUT and
    REFUSED the same command would fail again."""

    def __new__(cls, number: int, meaning: str) -> Any:
        """Make a member of the enum: the exit status ``number``, with ``meaning`` as its docstring, which users read."""
        one = int.__new__(cls, number)
        one._value_ = number
        one.__doc__ = meaning
        return one

    DONE = (
        0,
        "Done. Also asked to stop: `train` and the trials of `sweep` have saved; the last line says how to continue.",
    )
    FAILED = 1, "The work failed: training raised an error, a check did not hold, a checkpoint or a dataset is damaged."
    BAD_INPUT = 2, "A setting, an argument or an input cannot work; nothing was started."
    REFUSED = (
        3,
        "The run exists already or another driver holds it; or a run refused a command, or did not answer in time.",
    )
    UNREACHABLE = 4, "A file, the store or the cluster could not be read or written."
    INTERRUPTED = 130, "Interrupted at once, by a second Ctrl-C or SIGTERM, or where there was nothing to save."


def status_of(error: BaseException) -> Status:
    """Return the exit status of a command that ends with ``error``.

    >>> from springtide.errors import ConfigError
    >>> status_of(ConfigError("")).name, status_of(OSError("503 Slow Down")).name, status_of(KeyboardInterrupt()).name
    ('BAD_INPUT', 'UNREACHABLE', 'INTERRUPTED')
    """
    match error:
        case KeyboardInterrupt():
            return Status.INTERRUPTED
        case RunExists() | CommandFailed():
            return Status.REFUSED
        case ValueError():  # also ConfigError, CorpusError and DamagedFile, which are subclasses of ValueError
            return Status.BAD_INPUT
        case StoreUnavailable() | StoreLost():
            return Status.UNREACHABLE
        case SpringtideError():
            return Status.FAILED
        case OSError():
            return Status.UNREACHABLE
    return Status.FAILED
