"""Record where a run comes from, in its folder and in MLflow: command, source commit, datasets."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

from springtide import config as configs
from springtide.api.resolve import ResolvedRun
from springtide.errors import redacted
from springtide.run.find import lineage
from springtide.run.origin import Origin
from springtide.shards.manifest import HELDOUT, TRAIN
from springtide.tracking.mlflow_sink import TrackedDataset

_GIT_PATIENCE_S = 5.0
_OURS = "springtide"
_RAY_WORKER = "default_worker.py"
_MOST_DATASETS = 100
_NO_BRANCH = "HEAD"
"""Name that ``git rev-parse --abbrev-ref`` prints in place of a branch if the checkout has a detached HEAD."""
_EMPTY = "SPRINGTIDE_EMPTY"
"""Name of an environment variable that is set to an empty value. ``git --config-env`` copies it into settings that must be
blank. Unlike ``git -c``, this works for any characters in a setting's name."""
_SCOPES_OF_THE_USER = ("system", "global", "command")
"""Scopes of git settings that only the user can set. The content of a checkout cannot set them."""


def origin_of(command: Sequence[str], directory: str) -> Origin:
    """Return the command and, if it ran in a git checkout, the commit, branch and remote.

    Arguments are kept only for ``springtide`` itself, whose only secrets are in URLs, which are redacted. Arguments of another
    program may contain any secret, so they are dropped.

    Args:
        command: command line of a process, as ``sys.argv``.
        directory: working directory of the process.

    Examples:
        >>> from springtide.api.provenance import origin_of
        >>> origin_of(["bin/springtide", "train", "--run.root", "s3://id:key@bucket/runs"], "/").command
        "springtide train --run.root 's3://id:***@bucket/runs'"
        >>> origin_of(["mine.py", "--token", "secret"], "/").command
        'mine.py'
    """
    program = command[0] if command else ""
    # show no arguments of a sweep's trial: Ray passes its token as an argument
    if os.path.basename(program) == _RAY_WORKER:
        said = _OURS
    elif os.path.basename(program) in ("", _OURS) or program.endswith(f"{_OURS}/__main__.py"):
        said = shlex.join([_OURS, *map(redacted, command[1:])])
    else:
        said = redacted(program)
        directory = os.path.dirname(os.path.abspath(os.path.join(directory, program)))
    return checkout(directory, said)


def checkout(directory: str, command: str = "") -> Origin:
    """Return ``command`` with commit, branch and remote of the git checkout at ``directory``. If there is no checkout, or git
    fails, return the command alone."""
    head = _git(directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
    if len(head) != 2:
        return Origin(command)
    remote = _git(directory, "remote", "get-url", "origin")
    # Ignore changes in submodules. To find them, git would read the config of each submodule. That config may name programs to
    # run, and ``_own_filters`` does not check it
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    is_changed = bool(_git(directory, *status, without=_own_filters(directory)))
    commit, branch = head[0], "" if head[1] == _NO_BRANCH else head[1]
    return Origin(command, redacted(commit), redacted(branch), redacted(remote), is_changed)


def _own_filters(directory: str) -> list[str]:
    """Return the names of filter settings in a checkout's own git config. The caller must blank them: otherwise git would run
    the programs that they name on the checkout's files."""
    pattern = r"^filter\..*\.(clean|process|required)$"
    options = ("--null", "--show-scope", "--name-only", "--get-regexp", pattern)
    # surrogateescape: names of settings need not be UTF-8
    found = _git(directory, "config", *options, errors="surrogateescape").split("\0")
    return [name for scope, name in zip(found[::2], found[1::2], strict=False) if scope not in _SCOPES_OF_THE_USER]


def _git(directory: str, *arguments: str, without: Sequence[str] = (), errors: str = "replace") -> str:
    """Run git and return its output; empty if git fails. Settings in the checkout cannot make git start a program.

    Args:
        directory: directory of the checkout.
        arguments: subcommand and arguments of git.
        without: names of settings to replace by an empty value.
        errors: how to decode bytes that are not UTF-8, as for ``bytes.decode``.
    """
    # forbid network access: for a missing object git would contact the remote, whose settings may name a program to run
    variables = ["GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1", f"{_EMPTY}="]
    emptied = [f"--config-env={name}={_EMPTY}" for name in without]
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", *emptied, "-C", directory]
    command = ["env", *variables, "git", *options, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_GIT_PATIENCE_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # ValueError: a path or argument contains a zero byte
        return ""
    return done.stdout.decode(errors=errors).strip()


def tags_of(found: ResolvedRun, origin: Origin) -> dict[str, str]:
    """Return the MLflow tags of a run: origin, data and lineage. MLflow stores the settings separately, as parameters."""
    data, command = found.data, origin.command
    git = {"commit": origin.commit, "branch": origin.branch, "repoURL": origin.repository}
    git["dirty"] = str(origin.is_changed).lower() if origin.commit else ""
    return {
        # keep two words only: MLflow shows the text after the last slash as the source name, and an argument may contain a
        # slash
        "mlflow.source.name": " ".join(command.split()[:2]) if command.startswith(f"{_OURS} ") else command,
        "mlflow.source.type": "LOCAL",
        **{f"mlflow.source.git.{name}": text for name, text in git.items() if text},
        "springtide.command": command,
        "springtide.fingerprint": configs.fingerprint(found.config),
        "springtide.order": data.order.identity,
        "springtide.dataset": " ".join(data.datasets),
        "springtide.dataset_digest": " ".join(data.datasets.values()),
        "springtide.checkpoints": (found.run.folder / "checkpoints").url,
        "springtide.lineage": " <- ".join(lineage(found.config)),
    }


def datasets_of(found: ResolvedRun) -> list[TrackedDataset]:
    """Return the datasets of a run for MLflow's list, at most a hundred: first each source that it trains on, then each that it
    is only evaluated on."""
    used = [("training", TRAIN, one) for one in found.data.corpora]
    used += [("evaluation", HELDOUT, one) for one in found.data.eval_corpora]
    listed = []
    for context, split, corpus in used[:_MOST_DATASETS]:
        rows = corpus.whole.sources[corpus.source][split]
        profile = {"tokens": rows.tokens, "rows": rows.rows, "documents": rows.documents, "bytes": rows.num_bytes}
        profile["sequence_length"] = corpus.whole.sequence_length
        listed.append(TrackedDataset(corpus.name, corpus.identity.partition("/")[0], corpus.url, context, profile))
    return listed
