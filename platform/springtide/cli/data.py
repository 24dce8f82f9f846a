"""``springtide data prepare``: turn text into a sealed (complete and immutable) dataset, and label its rows by a model."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_trust, config_of
from springtide.cli.output import print_json, progress_bars, say
from springtide.errors import ConfigError, explain

if TYPE_CHECKING:
    from springtide.config import Config

_TOP_IDS = 64

_PREPARE = """  springtide data prepare --recipe demo
  springtide data prepare --recipe demo --corpus.source 's3://bucket/text/*.txt' --corpus.vocab-size 16384
  springtide data prepare --recipe demo --run.id twin --save twin.yaml   # for torchrun -m springtide.training
  springtide data prepare mine.yaml --label-by runs/TEACHER --label-what topk --label-out labels/TEACHER"""


def add(commands: Commands) -> None:
    """Add the group ``springtide data`` with its commands."""
    group = commands.group("data", "Turn text into datasets.")
    help = "Turn text into a sealed dataset, or find the one that was made before."
    group.command("prepare", _prepare, help, partial(_prepare_options, commands.show_all), _PREPARE)


def _prepare_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all, ("corpus", "shards"))
    add_trust(parser)
    parser.add_argument("--save", metavar="FILE", help="write the resolved config there")
    about = "What a model says about each row of the dataset, to learn from (objective.labels)."
    group = parser.add_argument_group("labels", about)
    help = "the model: a run's folder (its newest checkpoint), one of its checkpoints, or a folder of transformers"
    group.add_argument("--label-by", metavar="MODEL", default="", help=help)
    help = "topk: the most likely next ids at each position; logprob: the log-probability of each next token"
    group.add_argument("--label-what", choices=["topk", "logprob"], help=help)
    help = f"ids at each position, for topk (default {_TOP_IDS})"
    group.add_argument("--label-k", metavar="N", type=int, help=help)
    group.add_argument("--label-out", metavar="FOLDER", default="", help="folder or URL to create")
    add_json(parser)


def _prepare(options: argparse.Namespace) -> int:
    from springtide import config as configs
    from springtide.api.prepare import prepare
    from springtide.cli.inspect import show_dataset

    config = config_of(options, runs_code=False)
    labels = _check_labels(config, options)
    empty = [name for name, url in config.stream.mixture.items() if not url]  # ``prepare`` fills in one dataset for all
    with progress_bars() as progress:
        config = prepare(config, progress)
    if options.save:
        with open(options.save, "w") as file:
            if configs.secret_fields(config):
                os.fchmod(file.fileno(), 0o600)
            file.write(configs.dump(config))
    if not (labels and options.json):
        mixture = config.stream.mixture
        for url in dict.fromkeys(mixture[name] for name in empty or mixture) or [config.shards.dataset]:
            show_dataset(url, False, options.json)
    return _label(config, options) if labels else 0


def _check_labels(config: Config, options: argparse.Namespace) -> bool:
    """Return True if options request labels. Raises ConfigError, before data is prepared, if some of the label options are
    missing or do not fit together."""
    named = {f"--{name.replace('_', '-')}": getattr(options, name) for name in ("label_by", "label_what", "label_out")}
    given = {name: value for name, value in named.items() if value}
    missing = ", ".join(name for name in named if name not in given)
    if not given and options.label_k is None:
        return False
    if missing:
        name, value = next(iter(given.items()), ("--label-k", options.label_k))
        raise ConfigError(explain(name, value, "applies only to labels", f"give {missing}, too"))
    if options.label_k is not None and options.label_what != "topk":
        raise ConfigError(
            explain("--label-k", options.label_k, "applies only to topk", "leave it out, or give --label-what topk")
        )
    if config.stream.mixture:
        remedy = "leave the mixture out, and name one of its datasets: --shards.dataset"
        raise ConfigError(
            explain("--label-by", options.label_by, "labels one dataset, and stream.mixture has several", remedy)
        )
    return True


def _label(config: Config, options: argparse.Namespace) -> int:
    from springtide.api.label import label
    from springtide.shards import load_labels
    from springtide.storage import Folder

    k, what, trust = options.label_k, options.label_what, options.trust_code
    with progress_bars() as progress:
        dataset = config.shards.dataset
        url = label(
            dataset, options.label_by, what, options.label_out, _TOP_IDS if k is None else k, progress, trust_code=trust
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
