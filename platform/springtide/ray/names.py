"""Names of a run's actors and tasks, which show their owner in Ray's dashboard and in ``ray list actors``."""

from __future__ import annotations

import posixpath
import secrets

from springtide.config import Config, redact
from springtide.storage import Folder


def name_of(owner: str, role: str) -> str:
    """Return a name that no other actor of the cluster has.

    Args:
        owner: the id of the run, or the name of the sweep whose trials share the actor.
        role: what the actor does.

    Examples:
        >>> name_of("mine", "worker")  # doctest: +SKIP
        'mine/worker/3f9a0c1e'
    """
    return f"{owner}/{role}/{secrets.token_hex(4)}"


def owner_of(config: Config, is_trial: bool) -> str:
    """Return the owner in the names of the actors that train ``config``. It is the run's id, or for a trial the name of its
    sweep, because all trials of a sweep train in the same actors."""
    return posixpath.basename(posixpath.dirname(Folder(config.run.root).url)) if is_trial else config.run.id


def job_metadata(config: Config) -> dict[str, str]:
    """Return a run's metadata for ``ray list jobs --detail``: its id, folder and report, and where it is tracked. Empty for a
    job that trains no run."""
    if not config.run.id:
        return {}
    folder = Folder(config.run.root) / config.run.id
    found = {"run": config.run.id, "folder": folder.url, "report": folder.where("report.html")}
    if uri := redact(config).track.mlflow_uri:
        found["mlflow"] = uri
    return {f"springtide.{key}": value for key, value in found.items()}
