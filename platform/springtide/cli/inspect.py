"""``springtide inspect``: show the contents of a run, a checkpoint or a dataset, as text or as one JSON object."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say, say_line
from springtide.errors import ConfigError, damaged, explain

if TYPE_CHECKING:
    from springtide.storage import Folder

_EXAMPLES = """  springtide inspect runs/RUN                     # starts, and each checkpoint: age, size, state
  springtide inspect runs/RUN/checkpoints/step-0000000100 --verify
  springtide inspect datasets/FINGERPRINT         # counts, digests, a few rows as text"""
_MOST_LOOKED_AT = 100
"""Most subfolders that are checked for being a run's folder. In an object store each check is a request."""


def add(commands: Commands) -> None:
    """Add the command ``springtide inspect``."""
    help = "Show what a run, a checkpoint or a dataset holds."
    commands.command("inspect", _inspect, help, _options, _EXAMPLES)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the folder of a run, of a checkpoint or of a dataset")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare digests")
    add_json(parser)


def _inspect(options: argparse.Namespace) -> int:
    from springtide.checkpoint.format import step_of
    from springtide.config import RUN_CONFIG
    from springtide.shards import MANIFEST
    from springtide.storage import Folder

    path, folder = options.path, Folder(options.path)
    if folder.exists(RUN_CONFIG):
        return _show_run(path, "", options.verify, options.json)
    if step_of(folder.name) is not None:
        return _show_run(folder.url.rsplit("/", 2)[0], folder.name, options.verify, options.json)
    if folder.exists(MANIFEST):
        return show_dataset(path, options.verify, options.json)
    what, remedy = _other(folder, path)
    raise ConfigError(explain("path", path, f"{what}, neither a run nor a checkpoint nor a dataset", remedy))


def _other(folder: Folder, path: str) -> tuple[str, str]:
    """Describe a folder that is not a run, a checkpoint or a dataset. Returns the description, and a command to use instead."""
    from springtide.config import RUN_CONFIG
    from springtide.tune.folder import PLAN

    if folder.exists(PLAN):
        return "is a sweep", f"its trials: springtide run list {path}; its page: {path}/sweep.html"
    names = folder.names()
    runs = [name for name in names[:_MOST_LOOKED_AT] if folder.exists(f"{name}/{RUN_CONFIG}")]
    if runs:
        return "is a folder of runs", f"springtide run list {path}, or springtide inspect {path}/{runs[-1]}"
    if not names:
        return "is empty or does not exist", "give the folder of a run, <root>/<run id>, or of one of its checkpoints"
    return "is a folder", f"give <root>/<run id> or a checkpoint below it; springtide run list {path} lists runs"


def show_dataset(url: str, verify: bool, as_json: bool) -> int:
    """Print counts, digests and a few rows of a sealed (complete) dataset. Returns the exit status."""
    from springtide.api.prepare import CARD
    from springtide.dataset import open_dataset, rows_text
    from springtide.shards import HELDOUT, MANIFEST, TRAIN, SplitReader, check_shard
    from springtide.storage import Folder

    manifest, vocabulary = open_dataset(url)
    if verify:
        for split in manifest.splits.values():
            for shard in split.shards:
                check_shard(Folder(url), shard)
    if as_json:
        splits = {name: split.model_dump(exclude={"shards"}) for name, split in manifest.splits.items()}
        facts = {"digest": manifest.digest, "vocab_size": manifest.vocab_size, "source": manifest.source}
        sources = {
            source: {name: split.model_dump(exclude={"shards"}) for name, split in own.items()}
            for source, own in manifest.sources.items()
        }
        print_json({"dataset": url, **facts, "splits": splits, "sources": sources})
        return 0
    say(
        f"dataset {url}\n  digest {manifest.digest}, {manifest.vocab_size} ids, rows of {manifest.sequence_length} tokens"
    )
    for name, split in manifest.splits.items():
        say(
            f"  {name}: {split.documents} documents, {split.tokens} tokens, {split.rows} rows, {len(split.shards)} shards"
        )
    for name, own in manifest.sources.items() if len(manifest.sources) > 1 else ():
        train, heldout = (own.get(split) for split in (TRAIN, HELDOUT))
        trained = f"{train.tokens} tokens in {train.rows} rows, " if train else ""
        say(f"  source {name}: {trained}{heldout.tokens if heldout else 0} tokens held out")
    try:
        for line in _source_lines(manifest.source):
            say_line(line)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # the source entry is malformed
        what = f"its source is not what `data prepare` writes ({type(error).__name__}: {error})"
        raise damaged(Folder(url).where(MANIFEST), what) from None
    if Folder(url).exists(CARD):
        say(f"  card {Folder(url).where(CARD)}")
    shown = HELDOUT if manifest.is_eval_only else TRAIN
    rows = SplitReader(Folder(url), manifest, shown).read(_first_rows(manifest.splits[shown].rows))
    for row, text in zip(rows.sample_ids, rows_text(rows.tokens, vocabulary), strict=True):
        say(f"  row {row}: {text[:100]!r}")
    return 0


def _source_lines(source: dict[str, Any]) -> list[str]:
    """Return lines about a dataset's source text. ``source``: the entry ``source`` of the dataset's manifest. If it is
    malformed, this function raises one of the errors that ``show_dataset`` catches."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in source["dropped"].items() if count)
    edits = ", ".join(f"{count} {what}" for what, count in source["edits"].items() if count)
    edges = [edge for edge, _ in source["documents_by_tokens"]]
    ends = [f" to {edge - 1}" for edge in edges[1:]] + [" or more"]
    counts = zip(source["documents_by_tokens"], ends, strict=True)
    lengths = ", ".join(f"{count} of {edge}{end}" for (edge, count), end in counts if count)
    return [
        f"  from {source['source']}: {source['documents']} documents; dropped: {dropped or 'none'}",
        *([f"  files left out: {', '.join(source['left_out'])}"] if source.get("left_out") else []),
        *([f"  edited: {edits}"] if edits else []),
        f"  documents by their tokens: {lengths}",
        *(f"  broken: {one['name']}: {one['reason']}: {one['sample'][:60]!r}" for one in source["broken"]),
    ]


def _first_rows(rows: int) -> Any:
    import numpy as np

    return np.arange(min(3, rows))


def _show_run(url: str, only: str, verify: bool, as_json: bool) -> int:
    """Print the checkpoints of the run at ``url``, or only the one named ``only``. Returns the exit status."""
    from springtide.checkpoint.inspect import inspect
    from springtide.run.folder import open_run

    run = open_run(url)
    found = inspect(run.folder, verify, only)
    if only and not found:
        raise ConfigError(
            explain("path", only, "is not a checkpoint of this run", f"springtide inspect {url} lists the checkpoints")
        )
    starts, status = run.starts, run.status
    if as_json:
        shown = [{**one.facts, "problem": one.reason} for one in found]
        print_json({"run": run.id, "status": status, "steps": len(run.steps), "checkpoints": shown})
    else:
        say(f"run {run.id}: {status}, {len(run.steps)} of {run.config.num_steps} steps, {len(starts)} starts")
        for start in [] if only else starts:
            say_line(f"  started at step {start.step} with {start.world_size} workers {start.resumed_from}")
        for one in found:
            say_line(f"  {one}" + (", verified" if verify and one.state == "committed" else ""))
    return 1 if any(one.state == "bad" for one in found) else 0
