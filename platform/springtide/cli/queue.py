"""``springtide queue``: which of the runs that share a cluster has which workers."""

from __future__ import annotations

import argparse

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say
from springtide.errors import ConfigError, explain

_QUEUE = """  RAY_ADDRESS=auto springtide queue                      # on one of its nodes: who has what, and waits for what
  RAY_ADDRESS=auto springtide queue --quota research=8   # its runs get at most 8 workers together; =none: no limit"""


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Show the runs that share a cluster by run.queue and run.priority, and set the quotas of queues."
    commands.command("queue", _queue, help, _options, _QUEUE)


def _options(parser: argparse.ArgumentParser) -> None:
    quota = "the most workers that all runs of a queue may have together; none: no limit; may be given again"
    parser.add_argument("--quota", metavar="QUEUE=N", action="append", default=[], help=quota)
    add_json(parser)


def _queue(options: argparse.Namespace) -> int:
    from springtide.api.queue import queue

    found = queue(dict(map(_quota, options.quota)))
    if options.json:
        print_json({"runs": [one._asdict() for one in found.rows], "quotas": found.quotas})
    else:
        say(found.describe())
    return 0


def _quota(text: str) -> tuple[str, int | None]:
    name, _, most = text.partition("=")
    if not name or not (most == "none" or most.isdecimal()):
        raise ConfigError(explain("--quota", text, "is not a queue and a number", "write research=8 or research=none"))
    return name, None if most == "none" else int(most)
