"""The cluster's nodes: read Ray's view of them, find losses that Ray has not noticed yet, announce drains."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from springtide.elastic.allocation import fits
from springtide.elastic.copies import Domain
from springtide.elastic.policy import FAR_S, Node
from springtide.preemption.notices import TimeLeft
from springtide.ray._ray_private import HEAD, MARKET_LABEL, OWN_ACTORS, PREEMPTION, GcsClient, state
from springtide.tracking.ledger import SPOT

Key = TypeVar("Key")
_ANSWER_S = 0.5
"""How long a raylet (Ray's process on a node) may take to accept a connection before it is tried once more [s]."""
_UNDATED_S = 120.0
"""Assumed time until a node leaves if its notice has no deadline, counted from when the notice was seen [s]. A notice announces
that the node goes away; ``ray drain-node`` sends notices without a deadline."""
_FEW = 16
"""Up to this many actors are looked up one by one. For more, Ray's table of all actors is read: megabytes on a large
cluster."""
_ALIVE = "ALIVE"
_PROBES = 128
"""Connections that are tried at the same time."""
DOMAIN_LABELS = (
    ("ray.io/availability-region", "topology.kubernetes.io/region"),
    ("ray.io/availability-zone", "topology.kubernetes.io/zone"),
    ("cloud.google.com/gce-topology-block", "topology.k8s.aws/network-node-layer-2"),
    ("rack", "cloud.google.com/gce-topology-subblock", "topology.k8s.aws/network-node-layer-3"),
)
"""Node labels that name a node's failure domain, by level: region, zone, block, rack. At each level the first of the labels
that the node has is used. KubeRay sets the ``ray.io`` labels; the others are set with ``ray start --labels``."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of an HTTP/2 client (RFC 9113, section 3.4): a preface, and an empty SETTINGS frame. A gRPC server answers
with its settings; with TLS it closes the connection."""
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Connection errors that say nothing about the remote machine, because this machine has run out of files, memory or ports."""


def live() -> list[dict[str, Any]]:
    """Return the entry of each live node in Ray's table of nodes (``ray.nodes()``)."""
    return [node for node in ray.nodes() if node["Alive"]]


class NodeDeadlines:
    """A run's table of when nodes leave, from announced deadlines.

    Ray's table of draining nodes says which nodes leave and when, but not by which clock. If a node's own watcher has reported
    the time left by the node's clock, that time is used. If a drain has no deadline, the node is assumed to leave a fixed time
    after this table first saw the drain.
    """

    def __init__(self, reported: Callable[[], dict[str, TimeLeft]] = dict) -> None:
        """``reported``: returns node -> time left, as reported by the nodes' own watchers. Called only while a node drains."""
        self._reported = reported
        self._undated: dict[str, float] = {}
        """Node -> when its drain without a deadline was first seen, by ``time.monotonic`` [s]."""

    def leaves_at(self) -> dict[str, float]:
        """Return node -> when it leaves, by ``time.monotonic`` [s], for each node that is announced to leave."""
        draining, left = state.get_draining_nodes(), dict[str, TimeLeft]()
        if draining:
            with contextlib.suppress(RayError):  # without the watchers' reports, Ray's own deadlines are still known
                left = self._reported()
        undated = {name for name, deadline_ms in draining.items() if deadline_ms <= 0 and name not in left}
        self._undated = {name: self._undated.get(name, time.monotonic()) for name in undated}
        # count a drain without a deadline from when it was first seen: counted from now, its end would move on with each call
        dated = {name: _monotonic(ms, left.get(name)) for name, ms in draining.items() if name not in undated}
        return dated | {name: seen_s + _UNDATED_S for name, seen_s in self._undated.items()}


def observed(
    nodes: Sequence[Mapping[str, Any]],
    reserved: Mapping[str, Mapping[str, float]],
    resources: Mapping[str, float],
    deadlines: NodeDeadlines,
) -> list[Node]:
    """Return the policy's view of ``nodes``: how many workers of this run fit on each node, and when the node leaves, by
    ``time.monotonic`` [s].

    Args:
        nodes: entries that ``live`` has returned.
        reserved: node -> resources that are reserved there for this run.
        resources: resources of one worker, to count the workers that fit on each node.
        deadlines: the run's table of when nodes leave.
    """
    leaves_at, names = deadlines.leaves_at(), [node["NodeID"] for node in nodes]
    return [Node(name, fits(reserved.get(name, {}), resources.items()), leaves_at.get(name)) for name in names]


def unanswering(names: Collection[str], speaks: bool = False) -> set[str]:
    """Return the nodes of ``names`` whose raylet (Ray's process on the node) does not answer. Ray itself may notice a loss much
    later. To accept a connection counts as an answer; with ``speaks`` the raylet must also send a reply at once. A node that
    refuses the connection is lost. A silent node is tried a second time, because one packet may be lost. A node that accepts
    but sends nothing is stopped or busy. Raises OSError if this process cannot open any connection, which says nothing about
    the nodes."""
    addresses, hello = raylets_of(names), _HELLO if speaks else b""
    found = _connect(addresses, _ANSWER_S, hello)
    found |= _connect(
        {name: addresses[name] for name, error in found.items() if error == errno.ETIMEDOUT}, _ANSWER_S, hello
    )
    return {name for name in names if found.get(name) != 0}


def silent_nodes(names: Collection[str]) -> set[str]:
    """Return the nodes of ``names`` that do not answer (``unanswering``); an empty set if they cannot be probed."""
    with contextlib.suppress(RayError, OSError):
        return unanswering(set(names))
    return set()


def drain(gcs: str, node: str, deadline_ms: int, why: str) -> None:
    """Announce to Ray that a node leaves at ``deadline_ms``, in milliseconds since 1970. ``gcs``: address of the cluster's
    control store. Raises OSError if the control store refuses, Ray's RpcError if it is unreachable."""
    accepted, problem = GcsClient(address=gcs).drain_node(node, PREEMPTION, why, deadline_ms)
    if not accepted:
        raise OSError(f"Ray does not drain node {node}: {problem}")


def leftovers() -> dict[str, int]:
    """Return what an ended run has left in the cluster: the number of live actors by class, and the number of placement groups.
    Actors that Ray starts for itself are left out."""
    alive = [actor["ActorClassName"] for actor in state.actor_table(None).values() if actor["State"] == _ALIVE]
    found = Counter(name for name in alive if name not in OWN_ACTORS)
    groups = sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())
    return {**found, **({"placement groups": groups} if groups else {})}


def staying() -> list[str]:
    """Return the live nodes that will not be taken away within ``FAR_S``. Nodes on which workers may fit come first: nodes that
    have every kind of resource (CPU, GPU) that this process's own node has."""
    roomy, others = _staying(_soon(state.get_draining_nodes()))
    return roomy + others


def accepting(with_room: bool = False) -> list[str]:
    """Return the live nodes on which Ray starts actors: all but draining nodes, even if these leave only in a week. Nodes on
    which workers may fit come first, as in ``staying``; ``with_room`` returns only these nodes."""
    roomy, others = _staying(state.get_draining_nodes().keys())
    return roomy if with_room else roomy + others


def _staying(leaving: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the live nodes that are not ``leaving``, as two lists: nodes on which workers may fit, and all other nodes."""
    kinds = {
        node["NodeID"]: {kind for kind in ("CPU", "GPU") if node["Resources"].get(kind)}
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    }
    wanted = kinds.get(ray.get_runtime_context().get_node_id(), set())
    roomy = sorted(name for name, has in kinds.items() if wanted <= has)
    return roomy, sorted(kinds.keys() - set(roomy))


def may_be_taken_away(node: str) -> str:
    """If a node is a spot node, return its short id and its market label, such as '1a2b3c4d (ray.io/market-type=spot)'. Return
    an empty string for any other node."""
    [labels, *_] = [one.get("Labels", {}) for one in ray.nodes() if one["NodeID"] == node] or [{}]
    market = labels.get(MARKET_LABEL, "")
    return f"{node[:8]} ({MARKET_LABEL}={market})" if market.lower() in SPOT else ""


def markets() -> dict[str, str]:
    """Return node -> its market label in lower case ('spot', 'on-demand', or empty without a label), for each live node. The
    head node is left out unless it is the only node."""
    found = {
        one["NodeID"]: (one.get("Labels", {}).get(MARKET_LABEL, "").lower(), HEAD in one["Resources"]) for one in live()
    }
    return {node: market for node, (market, is_head) in found.items() if len(found) == 1 or not is_head}


def where() -> tuple[str, str, Domain]:
    """Return this process's node: its id, its market label in lower case (empty without a label), and its failure domain."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels()
    return context.get_node_id(), labels.get(MARKET_LABEL, "").lower(), domain_of(labels)


def domain_of(labels: Mapping[str, str]) -> Domain:
    """Return the failure domain of a node with these labels: region, zone, block, rack; a level without a label is empty.

    >>> domain_of({"ray.io/availability-zone": "us-east-1a", "rack": "r7"})
    ('', 'us-east-1a', '', 'r7')
    """
    return tuple(next((labels[label] for label in level if label in labels), "") for level in DOMAIN_LABELS)


def domains_of(nodes: Collection[str]) -> dict[str, Domain]:
    """Return node -> its failure domain, for those of ``nodes`` that are in Ray's table."""
    return {one["NodeID"]: domain_of(one.get("Labels", {})) for one in ray.nodes() if one["NodeID"] in nodes}


def standing(servers: Iterable[ActorHandle]) -> set[ActorHandle]:
    """Return the actors of ``servers`` whose node accepts a connection. Such an actor may be busy or stopped, but its node is
    not lost."""
    where = {actor: place["NodeID"] for actor, place in _places_of(servers).items()}
    silent = unanswering(set(where.values()))
    return {actor for actor, node in where.items() if node not in silent}


def processes_of(actors: Iterable[ActorHandle]) -> dict[ActorHandle, tuple[str, int]]:
    """Return actor -> address and port of its process, for the ``actors`` that Ray lists as alive."""
    return {actor: (entry["IPAddress"], entry["Port"]) for actor, entry in _places_of(actors).items()}


def raylets_of(names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return node -> address and port of its raylet, for the nodes of ``names`` that Ray lists as alive."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in (live() if names else ())
        if node["NodeID"] in names
    }


def mute(addresses: Mapping[Key, tuple[str, int]], timeout_s: float) -> set[Key]:
    """Return the keys of ``addresses`` whose Ray process is silent: it does not refuse a connection, but sends nothing within
    ``timeout_s`` [s]. The process is stopped, or its host is. gRPC's own threads answer whatever Python does, so a process that
    computes, waits or holds Python's lock is not returned. Raises OSError if this process cannot open any connection."""
    found = _connect(addresses, timeout_s, _HELLO)
    return {key for key, error in found.items() if error == errno.ETIMEDOUT}


def refusing(servers: Iterable[ActorHandle], timeout_s: float) -> set[ActorHandle]:
    """Return the actors of ``servers`` whose node is lost: it refuses a connection, or Ray does not list it as alive. Actors on
    a node that is merely silent for ``timeout_s`` [s] are left out, because that node may be up."""
    where = {actor: place["NodeID"] for actor, place in _places_of(servers).items()}
    addresses = raylets_of(set(where.values()))
    errors = _connect(addresses, timeout_s)
    return {actor for actor, node in where.items() if node not in addresses or errors.get(node) == errno.ECONNREFUSED}


def _places_of(actors: Iterable[ActorHandle]) -> dict[ActorHandle, dict[str, Any]]:
    """Return actor -> its address, port and node, for the ``actors`` that Ray lists as alive. More than ``_FEW`` actors are
    looked up in one request."""
    names = {actor: actor._actor_id.hex() for actor in actors}
    if len(names) > _FEW:
        table = state.actor_table(None, None, _ALIVE)
    else:
        table = {name: state.actor_table(name) for name in names.values()}
    alive = {name: entry for name, entry in table.items() if entry.get("State") == _ALIVE}
    return {actor: alive[name]["Address"] for actor, name in names.items() if name in alive}


def lost(before: Iterable[str]) -> set[str]:
    """Return the nodes of ``before`` that Ray does not list as alive now."""
    return set(before) - {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def leaving(before: Iterable[str]) -> set[str]:
    """Return the nodes of ``before`` that drain and leave within ``FAR_S``. A node that leaves later is still used."""
    return set(before) & _soon(state.get_draining_nodes())


def _soon(draining: Mapping[str, int]) -> set[str]:
    """Return the ``draining`` nodes that leave within ``FAR_S``, or at an unknown time."""
    far_ms = (time.time() + FAR_S) * 1000
    return {node for node, deadline_ms in draining.items() if deadline_ms < far_ms}


def _connect(addresses: Mapping[Key, tuple[str, int]], timeout_s: float, hello: bytes = b"") -> dict[Key, int]:
    """Try to connect to each address, ``_PROBES`` at a time; return an error number for each key. It is 0 if the address
    accepts the connection and, where ``hello`` is not empty, has sent any reply to ``hello``. It is ETIMEDOUT if the address is
    silent for ``timeout_s`` [s]."""
    waiting, found = list(addresses), dict[Key, int]()
    with selectors.DefaultSelector() as under_way:
        try:
            while waiting or under_way.get_map():
                while waiting and len(under_way.get_map()) < _PROBES:
                    try:
                        connection = _begin(addresses[waiting[-1]])
                    except OSError as error:
                        if error.errno not in _OWN_LIMITS:  # an error of the remote machine, such as no route
                            found[waiting.pop()] = error.errno or errno.EHOSTUNREACH
                            continue
                        if not under_way.get_map():
                            raise
                        break  # this machine's limit is reached: try again when another connection is closed
                    until_s = time.monotonic() + timeout_s
                    under_way.register(connection, selectors.EVENT_WRITE, (waiting.pop(), until_s))
                found |= _settled(under_way, hello)
        finally:
            for key in list(under_way.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # a socket, as registered above
    return found


def _begin(address: tuple[str, int]) -> socket.socket:
    """Return a socket that has begun to connect to ``address``; does not wait. Raises OSError if the connection fails at
    once."""
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    error = connection.connect_ex(address)
    if error not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(error, os.strerror(error))
    return connection


def _settled(under_way: selectors.BaseSelector, hello: bytes) -> dict[Any, int]:
    """Wait for the next events on open connections; return the error numbers of the connections that are done. Sends ``hello``
    on accepted connections. Closes connections whose outcome is known or whose time is over."""
    first_s = min((key.data[1] for key in under_way.get_map().values()), default=0.0)
    done = {key.fd: events for key, events in under_way.select(max(0.0, first_s - time.monotonic()))}
    found, now = {}, time.monotonic()
    for key in list(under_way.get_map().values()):
        name, until_s = key.data
        connection: socket.socket = key.fileobj  # type: ignore[assignment]  # as registered
        if done.get(key.fd) == selectors.EVENT_READ:  # a reply came; a closed connection counts as a reply
            found[name] = 0
        elif key.fd in done:
            found[name] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if hello and not found[name]:
                del found[name]
                with contextlib.suppress(OSError):  # the connection is closed already: the next read event shows that
                    connection.send(hello)
                under_way.modify(connection, selectors.EVENT_READ, key.data)
        if name not in found and now >= until_s:
            found[name] = errno.ETIMEDOUT
        if name in found:
            under_way.unregister(connection)
            connection.close()
    return found


def _monotonic(deadline_ms: int, told: TimeLeft | None) -> float:
    """Convert a node's deadline, in milliseconds since 1970, to ``time.monotonic`` [s]. ``told``: the time left as reported by
    the node's own watcher, None without a report. If the watcher reported this deadline, its time left is used, because the
    clocks of machines differ. Otherwise this machine's clock is used, or the watcher's time left if that is shorter. A deadline
    of 0 means unknown: ``_UNDATED_S`` from now."""
    left_s = deadline_ms / 1000 - time.time() if deadline_ms > 0 else _UNDATED_S
    if told is not None:
        left_s = told.left_s if told.deadline_ms == deadline_ms else min(told.left_s, left_s)
    return time.monotonic() + left_s
