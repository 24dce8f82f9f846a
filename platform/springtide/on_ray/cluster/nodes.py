"""The cluster's nodes: read Ray's view of them, find losses that Ray has not noticed yet, announce drains."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import ray

from springtide.elastic.policy import Node
from springtide.on_ray._ray_private import MARKET_LABEL, OWN_ACTORS, PREEMPTION, GcsClient, state
from springtide.track.ledger import SPOT

_ANSWER_S = 0.5
"""A raylet that accepts no connection for this long counts as dead [s]."""


def observed(reserved: Mapping[str, Mapping[str, float]], resources: Mapping[str, float]) -> list[Node]:
    """Return the live nodes. Each has the number of workers of ``resources`` that fit into what is ``reserved`` for this
    run on it, and the announced time when it leaves, in seconds of ``time.monotonic``."""
    leaving = state.get_draining_nodes()
    found = []
    for node in ray.nodes():
        name = node["NodeID"]
        if not node["Alive"]:
            continue
        here = reserved.get(name, {})
        places = min(
            (int(here.get(kind, 0.0) // amount) for kind, amount in resources.items() if amount > 0), default=0
        )
        leaves_at = _monotonic(leaving[name]) if name in leaving else None
        found.append(Node(name, places, leaves_at))
    return found


def unanswering(names: Collection[str]) -> set[str]:
    """Return those of the nodes that have no raylet which accepts a connection: Ray itself may notice much later."""
    addresses = {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["NodeID"] in names and node["Alive"]
    }
    with ThreadPoolExecutor(max(1, len(addresses)), "springtide-probe") as threads:
        answers = dict(zip(addresses, threads.map(_answers, addresses.values()), strict=True))
    return {name for name in names if not answers.get(name)}


def drain(gcs: str, node: str, at_s: float, why: str) -> None:
    """Announce to the cluster with its GCS at ``gcs`` that a node leaves at ``at_s``, in seconds since 1970. Raises OSError
    if the GCS refuses, Ray's RpcError if it is unreachable."""
    accepted, problem = GcsClient(address=gcs).drain_node(node, PREEMPTION, why, int(at_s * 1000))
    if not accepted:
        raise OSError(f"Ray does not drain node {node}: {problem}")


def leftovers() -> dict[str, int]:
    """Return what an ended run has left in the cluster: the number of live actors by class, and of placement groups. Ray's
    own actors do not count."""
    alive = [actor["ActorClassName"] for actor in state.actor_table(None).values() if actor["State"] == "ALIVE"]
    found = Counter(name for name in alive if name not in OWN_ACTORS)
    groups = sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())
    return {**found, **({"placement groups": groups} if groups else {})}


def staying(with_room: bool = False) -> list[str]:
    """Return the live nodes that are not draining. Nodes with room for workers come first, and with ``with_room`` only they
    are returned: they have all kinds of resources that this process's node has."""
    leaving, here = state.get_draining_nodes(), ray.get_runtime_context().get_node_id()
    kinds = {
        node["NodeID"]: {kind for kind in ("CPU", "GPU") if node["Resources"].get(kind)}
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    }
    wanted = kinds.get(here, set())
    roomy = sorted(name for name, has in kinds.items() if wanted <= has)
    return roomy if with_room else roomy + sorted(kinds.keys() - set(roomy))


def may_be_taken_away(node: str) -> str:
    """Return the node's name and its market label if it is a spot node, else an empty string."""
    [labels, *_] = [one.get("Labels", {}) for one in ray.nodes() if one["NodeID"] == node] or [{}]
    market = labels.get(MARKET_LABEL, "")
    return f"{node[:8]} ({MARKET_LABEL}={market})" if market.lower() in SPOT else ""


def where() -> tuple[str, str]:
    """Return the id of this process's node, and its market label in lower case, empty if it has none."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_node_labels().get(MARKET_LABEL, "").lower()


def lost(before: Iterable[str]) -> set[str]:
    """Return those of the nodes that are dead or draining."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(state.get_draining_nodes())
    return set(before) - alive


def _answers(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_ANSWER_S):
        return True
    return False


def _monotonic(deadline_ms: int) -> float:
    """Convert a deadline since 1970 [ms] to ``time.monotonic`` [s]. An unknown one (0) counts as 120 s from now; a draining
    node is never counted on anyway."""
    left_s = deadline_ms / 1000 - time.time() if deadline_ms > 0 else 120.0
    return time.monotonic() + left_s
