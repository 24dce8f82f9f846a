"""``springtide init``."""

from __future__ import annotations

import argparse
import os
import shlex

from springtide.cli.commands import Commands
from springtide.cli.output import say
from springtide.errors import ConfigError, explain

_NAME = "springtide.yaml"
_EXAMPLES = """  springtide init                                # writes springtide.yaml
  springtide init conf/mine.yaml && springtide train conf/mine.yaml"""


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Write a config file with the settings that people change, and what each one is."
    commands.command("init", _init, help, _options, _EXAMPLES)


def _options(parser: argparse.ArgumentParser) -> None:
    help = f"file to write, {_NAME} if none is named; a file that exists is never overwritten"
    parser.add_argument("path", metavar="PATH", nargs="?", default=_NAME, help=help)


def _init(options: argparse.Namespace) -> int:
    from springtide.config.starter import starter

    path = options.path
    if os.path.isdir(path):
        raise ConfigError(explain("PATH", path, "is a folder", f"name a file, such as {os.path.join(path, _NAME)}"))
    text = starter(shlex.quote(path))
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(explain("PATH", path, "exists, and is not overwritten", "name another file")) from None
    except FileNotFoundError:
        raise ConfigError(
            explain("PATH", path, "is in a folder that does not exist", "make the folder first")
        ) from None
    say(f"wrote {path}; next: springtide train {shlex.quote(path)}")
    return 0
