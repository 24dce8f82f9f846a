"""``springtide COMMAND``: the commands, one file per group, and the error handling of all commands.

springtide init                              a config file to begin with
           data prepare                      text to a sealed dataset
           inspect                           contents of a run, a checkpoint or a dataset
           train, sweep                      train one run; train many runs
           run status                        state of a run, what limits it and what to try
           run list | compare                many runs; two runs
           run save | pause | continue       control a run that trains
               resize | stop
           model evaluate | average          loss or scores of a checkpoint; mean of several checkpoints
           model generate                    text from a checkpoint
           model export | import             convert a model to or from the format of transformers
           verify, report                    prove which samples a run trained on; where its time went
           metrics                           names of the metrics in Prometheus
           queue                             the runs that share a cluster
           doctor                            check this machine and a store
           plan                              before paying: memory, node types, time, cost; goodput on spot capacity
           drill                             train on a local cluster that loses nodes
           notice                            announce that this node goes away
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from springtide.cli import data, elastic, init, inspect, model, run, train
from springtide.cli.commands import Commands, Status, status_of
from springtide.cli.output import PrintableFormatter, say
from springtide.errors import ConfigError, SpringtideError, explain

_NEW_OBJECTS = 50_000
"""Number of new objects after which Python's garbage collector runs; the default of 700 costs time at imports."""
_GUESSES = 3
"""Most options that an error message suggests in place of an unknown option."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``springtide``; None: the arguments of this process.

    Returns:
        The exit status: see ``springtide.cli.commands``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters of a run's name
    if logging.lastResort is not None:  # warnings may quote control characters, and passwords in URLs
        logging.lastResort.setFormatter(PrintableFormatter())
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and not words[0].startswith("-"):  # not for `--help`: importing config takes long
            _check_command(words)
        options, unknown = parser("--help-all" in words).parse_known_args(words)
        if unknown:
            raise _unknown(unknown[0])
        return int(options.command(options))
    except BrokenPipeError:  # `| head` closed stdout: without this, Python's flush at exit would fail
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return Status.DONE
    except (SpringtideError, ValueError, OSError) as error:
        return complain(error)
    except KeyboardInterrupt as error:
        goes_on = "; if it has saved a checkpoint, --resume continues from there" * (
            words[:1] in (["train"], ["sweep"])
        )
        say(f"\nstopped at once{goes_on}", error=True)
        return status_of(error)


def entry() -> None:
    """Entry point of the console script: run the command, then exit without freeing the modules of torch, Ray and MLflow, which
    would take a second. Threads are joined, and all ``atexit`` functions run."""
    status = int(Status.FAILED)

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its reader has exited
                stream.flush()
        os._exit(status)

    # by default garbage is collected after every 700 new objects, which would take a quarter of the time of all imports
    gc.set_threshold(_NEW_OBJECTS)
    atexit.register(leave)  # registered first, so it is called after all other exit functions
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise


def _check_command(words: Sequence[str]) -> None:
    """Raise ConfigError, with a replacement, if ``words`` name an unknown command, or a retired command or option."""
    from springtide.config.renames import replaces_command

    if problem := replaces_command(words):
        raise ConfigError(problem)
    _commands(argparse.ArgumentParser(), False).check(words)


def _unknown(option: str) -> ConfigError:
    from springtide import config as configs
    from springtide.config.fields import USUAL, fields
    from springtide.config.renames import limit_and_remedy

    known = {name: f"--{name.replace('_', '-')}" for name in sorted(fields(), key=lambda name: name not in USUAL)}
    setting = option.partition("=")[0].removeprefix("--").replace("-", "_")
    # first compare the words of names: `--lr` should suggest optim.peak_lr, but its spelling is nearer to run.id
    parts = [known[name] for name in known if {*setting.split("_")} <= {*re.split("[._]", name)}]
    guess = f"did you mean {' or '.join(parts[:_GUESSES])}?" if parts else configs.nearest(option, known.values())
    limit, remedy = limit_and_remedy(setting) or ("is not known here", guess)
    return ConfigError(explain("option", option, limit, remedy))


def complain(error: BaseException) -> Status:
    """Print an error that ends a command as ``springtide: MESSAGE`` on stderr, and return the exit status."""
    say(f"springtide: {error}", error=True)
    return status_of(error)


class _Version(argparse.Action):
    """Action of --version: prints the installed version. The version is read only here, because that reads files."""

    def __init__(self, option_strings: Sequence[str], dest: str, **named: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **named)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        say(f"springtide {metadata.version('springtide')}")
        parser.exit()


def parser(show_all: bool) -> argparse.ArgumentParser:
    """Return the parser of the command line; ``show_all``: --help shows every setting, not only the common ones."""
    whole = argparse.ArgumentParser(prog="springtide", description="Elastic training of language models on Ray.")
    whole.add_argument("--version", action=_Version, help="print the version and exit")
    _commands(whole, show_all)
    return whole


def _commands(whole: argparse.ArgumentParser, show_all: bool) -> Commands:
    commands = Commands(whole, show_all)
    before = (init.add, data.add, inspect.add, train.add, train.add_sweep)
    after = (run.add, model.add, run.add_metrics, elastic.add_plan, elastic.add, run.add_queue, init.add_doctor)
    for add in (*before, *after):
        add(commands)
    return commands


if __name__ == "__main__":
    entry()
