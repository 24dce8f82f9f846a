"""Read a checkpoint's file on another node: the second reader where all ranks that could be it are on the node that found the
file bad.

    rank --claimed?--> a task on the driver's node, else on others --> reads the file again

A process without torch, which Ray starts for the purpose: a second reader is needed rarely.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.checkpoint import leases
from springtide.checkpoint.second_reader import still_bad
from springtide.ray.cluster.nodes import accepting
from springtide.ray.train.mailbox import MailboxClient
from springtide.storage import Folder

_BEGIN_S = 60.0
"""How long a node may take to start a process and look for the run; a file may take as long as it needs [s]."""
_CANDIDATES = 3
"""Nodes that are asked."""
_log = logging.getLogger(__name__)


def read_elsewhere(mailbox: MailboxClient, run: Folder, name: str, file: str, nodes: Collection[str]) -> str | None:
    """Have ``file`` of checkpoint ``name`` read on a live node that is none of ``nodes``: the driver's first, whose storage is
    the run's. Returns what is wrong with it, empty if it is good, None if no other node sees the run.

    Raises:
        OSError: the store cannot be reached, or other nodes are up and none of them answers.
    """
    driver = ray.get(mailbox.actor.node.remote())
    others = sorted((node for node in accepting() if node not in nodes), key=lambda node: node != driver)
    silent = []
    for node in others[:_CANDIDATES]:
        there = {
            "name": f"{run.name}/read-again",
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        seen = ray.remote(_sees).options(**there).remote(run)
        try:
            if ray.get(seen, timeout=_BEGIN_S):
                return str(ray.get(ray.remote(still_bad).options(**there).remote(run, name, file)))
        except RayError as error:
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise OSError(str(error)) from None  # the store's
            ray.cancel(seen, force=True)
            silent.append(node)
            _log.warning("node %s does not read %s again: %s", node[:8], file, error)
    if silent:
        raise OSError(f"{file} of {run.url} looks bad, and nodes {', '.join(silent)} did not read it again")
    return None


def _sees(run: Folder) -> bool:
    """Return whether the run's folder is here: without its storage, every file is missing."""
    return leases.newest(run) is not None
