"""Print the output of commands. Only this file of ``cli`` calls ``print``, so that untrusted text is always made printable."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from springtide.errors import printable, redacted

if TYPE_CHECKING:
    from springtide.dataset import Progress


class PrintableFormatter(logging.Formatter):
    """Formats log lines as ``say`` does: without passwords and without characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of ``record``, printable and without passwords."""
        return printable(redacted(super().format(record)))


def say(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """Print ``text``, made printable and without passwords, and flush. Goes to standard output, or with ``error`` to stderr."""
    print(printable(redacted(text)), file=sys.stderr if error else sys.stdout, end=end, flush=True)


def say_line(text: str) -> None:
    """Print ``text``, which contains untrusted names or sentences, as one line. Text after a line break would look like a line
    of springtide's own output."""
    say(" ".join(text.splitlines()))


def write(text: str) -> None:
    """Print a part of a generated text without a line break, made printable but otherwise unchanged, and flush."""
    print(printable(text), end="", flush=True)


def print_json(value: Any, file: IO[str] | None = None) -> None:
    """Print ``value`` as the JSON output of a command with --json, by default to standard output. JSON escapes characters
    that are not printable."""
    from springtide.storage import to_json

    print(to_json(value), file=file)


@contextlib.contextmanager
def stdout_for_json() -> Iterator[Callable[[Any], None]]:
    """Yield a function like ``print_json``; only its output goes to standard output. Other output, by Ray's threads, libraries
    and child processes, goes to standard error. This redirection is permanent, because Ray may print until the process exits;
    it is temporary only if the caller has replaced ``sys.stdout``."""
    own = sys.__stdout__
    if own is not None and sys.stdout is own:
        own.flush()
        with os.fdopen(os.dup(own.fileno()), "w") as answer:
            os.dup2(sys.stderr.fileno(), own.fileno())
            yield functools.partial(print_json, file=answer)
    else:  # the caller has replaced sys.stdout, as tests do
        replaced = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield functools.partial(print_json, file=replaced)


# Progress bars on a terminal.


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function (stage, done, total) that shows one bar per stage; silent if stderr is not a terminal."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, visible=done < total)

        yield report
