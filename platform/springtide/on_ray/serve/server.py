"""Start a server on the connected cluster, look after it, and end it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from springtide.errors import ConfigError, SpringtideError, explain
from springtide.on_ray._ray_private import serve_address
from springtide.on_ray.serve.follow import Source
from springtide.on_ray.serve.replica import Replica

LOOPBACK, PORT = "127.0.0.1", 8000
_STREAMS_END_S = 60.0
"""How long a replica that is taken away may take to answer what it has begun [s]."""
_ASK_S = 10.0
_ANYWHERE = ("0.0.0.0", "::", "")


@dataclasses.dataclass(frozen=True)
class Serving:
    """How a model is served."""

    host: str = LOOPBACK
    """Address that is listened on. There is no authentication: whoever reaches it may ask."""
    port: int = PORT
    replicas: tuple[int, int] = (1, 1)
    """Fewest and most processes; between them their number follows the requests."""
    max_batch: int = 16
    """Most requests that are written together [rows]."""
    batch_wait_s: float = 0.01
    """How long a batch that is not full waits for more requests before it begins [s]."""
    max_waiting: int = 256
    """Requests of a replica above which it refuses more [requests]."""
    cpus: float = 1.0
    """CPUs of each replica, which are its threads, too [CPUs]."""
    gpus: float | None = None
    """GPUs of each replica; None: one if the cluster has any [GPUs]."""
    route: str = "/"
    """What comes before ``/v1`` in a URL."""

    def __post_init__(self) -> None:
        """Check the limits."""
        least, most = self.replicas
        if not 1 <= least <= most:
            raise ConfigError(
                explain("replicas", f"{least}:{most}", "is not 1 <= MIN <= MAX", "give one number, or 1:4")
            )
        for name in ("max_batch", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(explain(name, getattr(self, name), "must be at least 1", "give a positive number"))
        if not 0 < self.port < 2**16:
            raise ConfigError(explain("port", self.port, "is not within 1 and 65535", "use 8000"))
        for name in ("cpus", "gpus", "batch_wait_s"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(explain(name, getattr(self, name), "is negative", "give 0 or more"))
        if not re.fullmatch(r"/|(/[A-Za-z0-9_.-]+)+", self.route):
            raise ConfigError(explain("route", self.route, "is not the beginning of a path", "use / or /NAME"))


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs."""

    url: str
    """The URL of its API, with ``/v1``: the ``base_url`` of OpenAI's clients."""
    _handle: Any

    def state(self) -> dict[str, Any]:
        """Return what one of its replicas tells of the model: ``checkpoint``, ``step``, ``problem``. Empty if none answers."""
        with contextlib.suppress(RayError, TimeoutError):
            found: dict[str, Any] = self._handle.state.remote().result(timeout_s=_ASK_S)
            return dict(found["data"][0]["springtide"])
        return {}


@contextlib.contextmanager
def serving(source: Source, how: Serving, cluster_ends: bool = False) -> Iterator[Server]:
    """Serve a model on the connected cluster in the block; at its end requests that have begun are answered.

    Where Serve runs already, its proxies serve this model too, under ``how.route``. What is started of Serve is ended, unless
    ``cluster_ends``: then the cluster takes it along.

    Raises:
        ConfigError: the port is taken, or Serve runs already and listens elsewhere.
        SpringtideError: no replica could start.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of this process; replicas keep theirs
    address = serve_address()
    if address not in (None, (how.host, how.port)):
        limit = f"this cluster's Serve listens on {address[0]}:{address[1]} already"
        remedy = f"use --host {address[0]} --port {address[1]} with a --route of its own, or end it: serve shutdown"
        raise ConfigError(explain("port", how.port, limit, remedy))
    with contextlib.ExitStack() as stack:
        if address is None:
            _check_port(how)
            if not cluster_ends:
                stack.callback(serve.shutdown)
            options = {"host": how.host, "port": how.port}
            with _told(how):
                serve.start(proxy_location="HeadOnly", http_options=options)
        application = re.sub(r"[^A-Za-z0-9_-]", "-", f"{source.name}{how.route.rstrip('/')}")
        stack.callback(_delete, application)
        with _told(how):
            handle = serve.run(_bound(source, how), name=application, route_prefix=how.route)
        shown = LOOPBACK if how.host in _ANYWHERE else how.host
        yield Server(f"http://{shown}:{how.port}{how.route.rstrip('/')}/v1", handle)


def _bound(source: Source, how: Serving) -> Any:
    least, most = how.replicas
    size: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": how.max_batch}
        size = {"autoscaling_config": scaling}
    gpus = float(bool(ray.cluster_resources().get("GPU"))) if how.gpus is None else how.gpus
    _check_room({"CPU": how.cpus, "GPU": gpus})
    deployment = serve.deployment(
        Replica,
        name="model",
        # above what a replica takes it answers 503 itself: a client's library reads its JSON
        max_ongoing_requests=how.max_waiting + how.max_batch + 64,
        graceful_shutdown_timeout_s=_STREAMS_END_S,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": how.cpus, "num_gpus": gpus},
        **size,
    )
    return deployment.bind(source, how.max_batch, how.batch_wait_s, how.max_waiting)


def _check_room(wanted: dict[str, float]) -> None:
    """Raise ConfigError if no node can hold a replica: Serve would wait for one without a word."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
        kind = "GPU" if most["GPU"] < wanted["GPU"] else "CPU"
        name, limit = f"{kind.lower()}s", f"no node of the cluster has as many {kind}s: the largest has {most[kind]:g}"
        raise ConfigError(explain(name, wanted[kind], limit, f"give less with --{name}-per-replica"))


def _delete(application: str) -> None:
    with contextlib.suppress(RayError, RuntimeError):  # the cluster may have ended before
        serve.delete(application)


def _check_port(how: Serving) -> None:
    """Raise ConfigError if this machine cannot listen there; on another one Serve itself finds out."""
    family = socket.AF_INET6 if ":" in how.host else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((how.host, how.port))
        except OSError as error:
            problem = f"cannot be listened on at {how.host} ({error.strerror or error})"
            raise ConfigError(explain("port", how.port, problem, "name another one with --port, or --host")) from None


@contextlib.contextmanager
def _told(how: Serving) -> Iterator[None]:
    """Raise what Ray says of a failed start as an error of ours, with its last line."""
    try:
        yield
    except (RayError, RuntimeError, ValueError) as error:
        last = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise SpringtideError(f"the server could not start: {last}") from error


def watch(server: Server, say: Callable[[str], None], wait: Callable[[], bool]) -> None:
    """Tell each change of what serves until ``wait``, which is called between two looks, returns True."""
    told: set[str] = set()
    while not wait():
        state = server.state()
        news = [f"{state['checkpoint']} serves"] if state else ["no replica answers"]
        news += [state["problem"]] if state.get("problem") else []
        for one in news:
            if one not in told:
                say(one)
        told = {*(told if state else ()), *news}
