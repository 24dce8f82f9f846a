"""What MLflow and the run's folder are told of its origin: command, source commit, datasets, checkpoints."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence

from springtide import config as configs
from springtide.app.resolve import ResolvedRun
from springtide.errors import redacted
from springtide.run.origin import Origin
from springtide.run.start_from import lineage
from springtide.shards.manifest import HELDOUT, TRAIN
from springtide.track.mlflow_run import TrackedDataset

_SOURCE, _COMMAND = "mlflow.source", "springtide.command"
_GIT_PATIENCE_S = 5.0
_OURS = "springtide"
_RAY_WORKER = "default_worker.py"
_MOST_DATASETS = 100


def tags_of(found: ResolvedRun, command: Sequence[str], directory: str) -> dict[str, str]:
    """Return the MLflow tags of a run, in addition to its settings.

    Args:
        found: the run.
        command: of this process, as ``sys.argv``.
        directory: that the process works in.
    """
    data = found.data
    return {
        **source_tags(command, directory),
        "springtide.fingerprint": configs.fingerprint(found.config),
        "springtide.order": data.order.identity,
        "springtide.dataset": " ".join(data.datasets),
        "springtide.dataset_digest": " ".join(data.datasets.values()),
        "springtide.checkpoints": (found.run.folder / "checkpoints").url,
        "springtide.lineage": " <- ".join(lineage(found.config)),
    }


def origin_of(command: Sequence[str], directory: str) -> Origin:
    """Return the same as ``source_tags``, for the run's folder."""
    tags = source_tags(command, directory)
    commit, branch, url, dirty = (
        tags.get(f"{_SOURCE}.git.{name}", "") for name in ("commit", "branch", "repoURL", "dirty")
    )
    return Origin(tags[_COMMAND], commit, branch, url, dirty == "true")


def source_tags(command: Sequence[str], directory: str) -> dict[str, str]:
    """Return what MLflow shows as the source of a run: the command and, of a git checkout, commit, branch and remote.

    Only the arguments of ``springtide`` itself are shown, whose secrets are in URLs and redacted; those of another program may
    hold any.

    Args:
        command: of a process, as ``sys.argv``.
        directory: that it works in.

    Examples:
        >>> from springtide.app.provenance import source_tags
        >>> source_tags(["bin/springtide", "train", "--run.root", "s3://id:key@bucket/runs"], "/")["springtide.command"]
        "springtide train --run.root 's3://id:***@bucket/runs'"
        >>> source_tags(["mine.py", "--token", "secret"], "/")["mlflow.source.name"]
        'mine.py'
    """
    program = command[0] if command else ""
    if os.path.basename(program) == _RAY_WORKER:  # a trial: Ray's arguments hold the token of its cluster
        said = _OURS
    elif os.path.basename(program) in ("", _OURS) or program.endswith(f"{_OURS}/__main__.py"):
        said = shlex.join([_OURS, *map(redacted, command[1:])])
    else:
        said = redacted(program)
        directory = os.path.dirname(os.path.abspath(os.path.join(directory, program)))
    # MLflow's pages show what follows the last slash of the name
    shown = " ".join([_OURS, *command[1:2]]) if said.startswith(f"{_OURS} ") else said
    return {f"{_SOURCE}.name": shown, _COMMAND: said, f"{_SOURCE}.type": "LOCAL", **checkout(directory)}


def checkout(directory: str) -> dict[str, str]:
    """Return the tags of the git checkout that ``directory`` is in; none if it is in no checkout, or git does not answer.

    Args:
        directory: any folder.
    """
    head = _git(directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
    if len(head) != 2:
        return {}
    found = {"commit": head[0], "branch": head[1], "repoURL": _git(directory, "remote", "get-url", "origin")}
    found["dirty"] = str(bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))).lower()
    return {f"{_SOURCE}.git.{name}": redacted(value) for name, value in found.items() if value}


def _git(directory: str, *arguments: str) -> str:
    # a monitor that a checkout's own config names would be run by git
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", directory, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def datasets_of(found: ResolvedRun) -> list[TrackedDataset]:
    """Return the datasets of a run as MLflow lists them, at most a hundred: each source that it trains on, then each that it is
    only evaluated on."""
    return list(_datasets(found))[:_MOST_DATASETS]


def _datasets(found: ResolvedRun) -> Iterator[TrackedDataset]:
    for context, split, corpora in (
        ("training", TRAIN, found.data.corpora),
        ("evaluation", HELDOUT, found.data.eval_corpora),
    ):
        for corpus in corpora:
            rows = corpus.whole.sources[corpus.source][split]
            profile = {"tokens": rows.tokens, "rows": rows.rows, "documents": rows.documents, "bytes": rows.num_bytes}
            profile["sequence_length"] = corpus.whole.sequence_length
            yield TrackedDataset(corpus.name, corpus.identity.partition("/")[0], corpus.url, context, profile)
