"""``springtide init``: write a config file of the settings that people change most, each with its description. ``springtide
doctor``: check this machine and a store."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import textwrap

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say
from springtide.errors import ConfigError, explain

_NAME = "springtide.yaml"
_EXAMPLES = """  springtide init                                # writes springtide.yaml
  springtide init conf/mine.yaml && springtide train conf/mine.yaml"""


def add(commands: Commands) -> None:
    """Add the command ``springtide init``."""
    help = "Write a config file with the settings that people change, and what each one is."
    commands.command("init", _init, help, _options, _EXAMPLES)


def _options(parser: argparse.ArgumentParser) -> None:
    help = f"file to write, {_NAME} if none is named; a file that exists is never overwritten"
    parser.add_argument("path", metavar="PATH", nargs="?", default=_NAME, help=help)


def _init(options: argparse.Namespace) -> int:
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


_ALSO = ("corpus.max_files", "stream.max_epochs", "model.num_kv_heads", "model.ffn_dim")
"""Settings to write besides ``USUAL``: the recipe tiny changes them, and a user's own text or model needs other values."""
_HEAD = """\
# A config of springtide. It trains as it is, in seconds:
#   springtide train {name} --dry-run    # decides everything, trains nothing
#   springtide train {name}
# What it leaves out is the recipe's. All settings: springtide train --help-all
recipe: tiny
"""
_WIDTH = 110


def starter(name: str) -> str:
    """Return the text of a config file that trains the recipe tiny, with a comment above each setting.

    Args:
        name: name of the file, for the commands in its comments.
    """
    from springtide.config.fields import USUAL, fields
    from springtide.config.files import flatten
    from springtide.config.recipes import tiny
    from springtide.config.schema import Config

    values, lines, section = flatten(tiny()), [_HEAD.format(name=name)], ""
    for setting in (one for one in fields() if one in USUAL or one in _ALSO):
        above, _, field = setting.partition(".")
        if above != section:
            lines += [f"\n# {Config.model_fields[above].description}\n{above}:\n"]
            section = above
        about = " ".join(fields()[setting].description.split()).replace("``", "`")
        lines += [f"  # {line}\n" for line in textwrap.wrap(about, _WIDTH, break_on_hyphens=False)]
        lines.append(f"  {field}: {json.dumps(values[setting], allow_nan=False)}\n")
    return "".join(lines)


# ``springtide doctor``: check that this machine is fit to train, and that a run's store is fast enough.

_DOCTOR = """  springtide doctor                          # versions, devices, memory, disk, environment, gloo
  springtide doctor --store s3://bucket/runs   # the store, too: latency, speed, conditional puts, its clock
  springtide doctor --upload .               # what `ray job submit --working-dir .` would send: size, uncommitted changes"""


def add_doctor(commands: Commands) -> None:
    """Add the command ``springtide doctor``."""
    help = "Check this machine and a store before training: each line has a figure, a limit and a remedy."
    commands.command("doctor", _doctor, help, _doctor_options, _DOCTOR)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", default="", metavar="URL", help="folder or URL to measure; what is written is removed"
    )
    help = "folder to submit as a Ray job's working directory: its size, as Ray counts it, and uncommitted changes"
    parser.add_argument("--upload", default="", metavar="FOLDER", help=help)
    parser.add_argument("--root", default="runs", metavar="FOLDER", help="local folder of runs; its disk is checked")
    add_json(parser)


def _doctor(options: argparse.Namespace) -> int:
    from springtide.api.doctor import doctor

    found = []
    for one in doctor(options.store, options.root, upload=options.upload):
        found.append(one)
        if not options.json:
            say(one.describe())
    failed = sum(one.status == "fail" for one in found)
    warned = sum(one.status == "warn" for one in found)
    if options.json:
        print_json({"ok": not failed, "checks": [one._asdict() for one in found]})
    else:
        say(f"{len(found)} checks: {failed} failed, {warned} warnings")
    return 1 if failed else 0
