"""``springtide doctor``: whether this machine is fit to train, and its store fast enough."""

from __future__ import annotations

import argparse

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say

_DOCTOR = """  springtide doctor                          # versions, devices, memory, disk, environment, gloo
  springtide doctor --store s3://bucket/runs   # the store, too: latency, speed, conditional puts, its clock
  springtide doctor --upload .               # what `ray job submit --working-dir .` would send: size, uncommitted changes"""


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Check this machine and a store before training: each line has a figure, a limit and a remedy."
    commands.command("doctor", _doctor, help, _options, _DOCTOR)


def _options(parser: argparse.ArgumentParser) -> None:
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
