"""``springtide data prepare | inspect | label``."""

from __future__ import annotations

import argparse
import os
from functools import partial

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_trust, config_of
from springtide.cli.output import print_json, progress_bars, say

_PREPARE = """  springtide data prepare --recipe demo
  springtide data prepare --recipe demo --corpus.source 's3://bucket/text/*.txt' --corpus.vocab-size 16384
  springtide data prepare --recipe demo --run.id twin --save twin.yaml   # for torchrun -m springtide.training"""
_INSPECT = """  springtide data inspect datasets/FINGERPRINT    # counts, digests, a few rows as text
  springtide data inspect datasets/FINGERPRINT --verify"""

_LABEL = """  springtide data label datasets/DATASET --by runs/TEACHER --what topk --k 64 --out labels/TEACHER
  springtide data label datasets/DATASET --by downloads/MODEL --what logprob --out s3://bucket/labels/MODEL"""


def add(commands: Commands) -> None:
    """Add the group."""
    group = commands.group("data", "Turn text into datasets, and inspect them.")
    help = "Turn text into a sealed dataset, or find the one that was made before."
    group.command("prepare", _prepare, help, partial(_prepare_options, commands.show_all), _PREPARE)
    group.command("inspect", _inspect, "Show what a dataset holds.", _inspect_options, _INSPECT)
    help = "Write what a model says about each row of a dataset, to learn from."
    group.command("label", _label, help, _label_options, _LABEL)


def _prepare_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all, ("corpus", "shards"))
    add_trust(parser)
    parser.add_argument("--save", metavar="FILE", help="write the resolved config there")
    add_json(parser)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the dataset's folder")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    add_json(parser)


def _prepare(options: argparse.Namespace) -> int:
    from springtide import config as configs
    from springtide.api.prepare import prepare
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


def _label_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="the dataset's folder")
    help = "the model: a run's folder (its newest checkpoint), one of its checkpoints, or a folder of transformers"
    parser.add_argument("--by", metavar="MODEL", required=True, help=help)
    help = "topk: the most likely next ids at each position; logprob: the log-probability of each next token"
    parser.add_argument("--what", choices=["topk", "logprob"], required=True, help=help)
    parser.add_argument("--k", metavar="N", type=int, default=64, help="ids at each position, for topk (default 64)")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder or URL to create")
    add_trust(parser)
    add_json(parser)


def _label(options: argparse.Namespace) -> int:
    from springtide.api.label import label
    from springtide.shards import load_labels
    from springtide.storage import Folder

    with progress_bars() as progress:
        url = label(
            options.dataset, options.by, options.what, options.out, options.k, progress, trust_code=options.trust_code
        )
    found = load_labels(Folder(url))
    if options.json:
        facts = found.model_dump(mode="json", exclude={"groups", "format"})
        print_json({"labels": url, "digest": found.digest, **facts})
        return 0
    say(f"labels {url}\n  digest {found.digest}, of the dataset {found.dataset}")
    say(f"  {found.what}{f', k = {found.k}' if found.k else ''}, {found.row_bytes:,} bytes a row")
    say(f"  by {', '.join(f'{name} {value}' for name, value in found.labeller.items())}")
    say(f"to learn from them, set objective.source and objective.labels = {url}")
    return 0
