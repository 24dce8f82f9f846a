"""``springtide data prepare | inspect``."""

from __future__ import annotations

import argparse
import os
from functools import partial

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_trust, config_of
from springtide.cli.progress import progress_bars

_PREPARE = """  springtide data prepare --recipe demo
  springtide data prepare --recipe demo --corpus.source 's3://bucket/text/*.txt' --corpus.vocab-size 16384
  springtide data prepare --recipe demo --run.id twin --save twin.yaml   # for torchrun -m springtide.training"""
_INSPECT = """  springtide data inspect datasets/FINGERPRINT    # counts, digests, a few rows as text
  springtide data inspect datasets/FINGERPRINT --verify"""


def add(commands: Commands) -> None:
    """Add the group."""
    group = commands.group("data", "Turn text into datasets, and inspect them.")
    help = "Turn text into a sealed dataset, or find the one that was made before."
    group.command("prepare", _prepare, help, partial(_prepare_options, commands.show_all), _PREPARE)
    group.command("inspect", _inspect, "Show what a dataset holds.", _inspect_options, _INSPECT)


def _prepare_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    add_trust(parser)
    parser.add_argument("--save", metavar="FILE", help="write the resolved config there")
    add_json(parser)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the dataset's folder")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    add_json(parser)


def _prepare(options: argparse.Namespace) -> int:
    from springtide import config as configs
    from springtide.app.prepare import prepare
    from springtide.cli.inspect import show_dataset

    with progress_bars() as progress:
        config = prepare(config_of(options, runs_code=False), progress)
    if options.save:
        with open(options.save, "w") as file:
            if configs.secret_fields(config):
                os.fchmod(file.fileno(), 0o600)
            file.write(configs.dump(config))
    return show_dataset(config.shards.dataset, False, options.json)


def _inspect(options: argparse.Namespace) -> int:
    from springtide.cli.inspect import inspect_dataset

    return inspect_dataset(options.path, options.verify, options.json)
