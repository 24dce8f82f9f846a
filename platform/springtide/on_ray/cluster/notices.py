"""One small actor per node that polls for the node's preemption notice and announces it to Ray: a drain with the deadline.

    metadata service or file --every 0.5 s--> PreemptionWatcher --drain_node(deadline)--> Ray --> the policies of every run

A service that is slow, gone or sends nonsense is polled again; its last notice stands until it sends another. A notice that
Ray did not accept, because its control store is away, is announced again at the next poll. Only its run ends a watcher.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.notices import (
    Notice,
    notice_files,
    parse_aws_notice,
    parse_aws_rebalance,
    parse_azure_notice,
    parse_gcp_notice,
    parse_notice_file,
)
from springtide.on_ray.cluster.nodes import drain

_log = logging.getLogger(__name__)

Cloud = Literal["aws", "gcp", "azure", ""]
METADATA = "http://169.254.169.254"
_POLL_S = 0.5
_ANSWER_S = 2.0
_FILE_BYTES = 100
_SILENT_LOOKS = 20
"""Consecutive failed polls before a source counts as silent: ten seconds, or more if it is slow."""
_ASK_WATCHES_S = 10.0
"""Interval of the checks whether the watchers' sources answer [s]."""
_FIRST_AZURE_S = 120.0
"""How long a machine's first request for its events may take [s]: Azure starts to watch them only then."""
_TOKEN_S = 21600
_VENDORS = {"Amazon EC2": "aws", "Google": "gcp"}
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def cloud_here() -> Cloud:
    """Return the cloud of this machine by its firmware's strings, empty if unknown. Uses no network."""

    def firmware(name: str) -> str:
        with contextlib.suppress(OSError):
            return Path("/sys/class/dmi/id", name).read_text().strip()
        return ""

    if firmware("chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    found = _VENDORS.get(firmware("sys_vendor"), "")
    return "aws" if found == "aws" else "gcp" if found == "gcp" else ""


class MetadataService:
    """Client of a cloud's metadata service. Ignores proxy settings: they are for other addresses."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token = ""
        self._machine = ""
        self._asked = False

    def aws(self, rebalance: bool = False) -> Notice | None:
        """Return the notice of AWS's IMDSv2, None if there is none; ``rebalance``: its rebalance recommendation counts, too."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._ask("/latest/api/token", ttl, method="PUT") or ""
        token = {"X-aws-ec2-metadata-token": self._token}
        try:
            answer = self._ask("/latest/meta-data/spot/instance-action", token)
            if answer is not None:
                return parse_aws_notice(answer)
            answer = self._ask("/latest/meta-data/events/recommendations/rebalance", token) if rebalance else None
            return parse_aws_rebalance(answer) if answer is not None else None
        except urllib.error.HTTPError as error:
            if error.code == 401:  # the token has expired, or is from before a reboot
                self._token = ""
            raise

    def gcp(self) -> Notice | None:
        """Return the notice of Google's metadata server, None if there is none."""
        answer = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return parse_gcp_notice(answer, time.time()) if answer is not None else None

    def azure(self) -> Notice | None:
        """Return the notice for this machine in Azure's scheduled events, None if there is none."""
        header = {"Metadata": "true"}
        if not self._machine:
            where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = self._ask(where, header) or ""
        patience_s = _ANSWER_S if self._asked else _FIRST_AZURE_S
        answer = self._ask("/metadata/scheduledevents?api-version=2020-07-01", header, patience_s=patience_s)
        self._asked = True
        return parse_azure_notice(answer, self._machine, time.time()) if answer is not None else None

    def _ask(
        self, path: str, headers: dict[str, str], method: str = "GET", patience_s: float = _ANSWER_S
    ) -> str | None:
        """Return the answer; None for 404. Raises OSError for any other failure."""
        request = urllib.request.Request(self._url + path, headers=headers, method=method)
        try:
            with self._open(request, timeout=patience_s) as answer:
                return str(answer.read(2**16).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def watched_files(pattern: str, node: str) -> list[Path]:
    """Return the files that a watcher on ``node`` polls, as this process's user."""
    return [Path(name.replace("{node}", node)) for name in notice_files(pattern, os.getuid())] if pattern else []


def left_in(path: Path) -> Notice | None:
    """Return the notice in a file, None if there is no file. Raises ValueError if it is not a regular file (opening a FIFO
    would wait for its writer), PermissionError if a user who is neither this one nor root may have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a link: name the file itself (elastic.notice_file)") from None
        raise
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to user {os.getuid()} or root")
        if found.st_mode & stat.S_IWOTH:
            raise PermissionError(f"{path} is not obeyed: every user may write to it; chmod o-w it")
        return parse_notice_file(file.read(_FILE_BYTES).decode(), found.st_mtime, time.time())


class Relay:
    """A relay of the node's end to Ray: announces the first notice, and again an earlier one. Thread-safe."""

    def __init__(self, drain: Callable[[float, str], None]) -> None:
        """``drain(at_s, why)`` announces the end to Ray, ``at_s`` in seconds since 1970; if it raises, Ray does not know."""
        self._drain = drain
        self._announced: Notice | None = None
        self._lock = threading.Lock()

    def __call__(self, notice: Notice) -> None:
        """Announce ``notice``, unless Ray knows that time or an earlier one."""
        with self._lock:
            # a service without a deadline returns a later time at each poll: the first counts
            if self._announced is not None and notice.at_s >= self._announced.at_s:
                return
            self._drain(max(notice.at_s, time.time() + 1.0), notice.why)
            self._announced = notice


class NoticeSource:
    """One service or file that is polled for notices."""

    def __init__(self, name: str, ask: Callable[[], Notice | None], on_notice: Callable[[Notice], None]) -> None:
        self.name, self._ask, self._on_notice = name, ask, on_notice
        self._failed_looks = 0
        self._warned: set[type[BaseException]] = set()
        self._last_problem = ""

    @property
    def problem(self) -> str:
        """Why it has not answered for a while; empty if it answers."""
        return self._last_problem if self._failed_looks >= _SILENT_LOOKS else ""

    def look(self) -> None:
        """Poll once, and pass on a notice. Whatever fails is tried again at the next poll."""
        try:
            notice = self._ask()
            if notice is not None:
                self._on_notice(notice)
        except Exception as error:  # a server, a parser or Ray may raise anything, and the next poll may work
            self._failed_looks += 1
            self._last_problem = f"{self.name}: {type(error).__name__}: {str(error)[:200]}"
            if type(error) not in self._warned:  # log each kind once, until a poll works again
                self._warned.add(type(error))
                _log.warning("%s; it is polled again", self._last_problem)
        else:
            self._failed_looks, self._last_problem = 0, ""
            self._warned.clear()


class PreemptionWatcher:
    """A poller of one node's sources; one per node and run. Ends with the run's controller."""

    def __init__(self, cloud: str, metadata_url: str, file: str, rebalance: bool) -> None:
        """``cloud``: ``auto`` detects it. ``file``: a path; as ``elastic.notice_file``."""
        context = ray.get_runtime_context()
        node, gcs = context.get_node_id(), context.gcs_address
        service = MetadataService(metadata_url or METADATA)
        asks: dict[str, Callable[[], Notice | None]] = {
            "aws": lambda: service.aws(rebalance),
            "gcp": service.gcp,
            "azure": service.azure,
        }
        cloud = cloud_here() if cloud == "auto" else cloud
        chosen = {cloud: asks[cloud]} if cloud in asks else {}
        for name, path in zip(("file", "root's file"), watched_files(file, node), strict=False):
            chosen[name] = functools.partial(left_in, path)
        relay = Relay(lambda at_s, why: drain(gcs, node, at_s, why))
        self._sources = [NoticeSource(name, ask, relay) for name, ask in chosen.items()]
        for source in self._sources:
            threading.Thread(target=_watch, args=(source,), daemon=True).start()

    def sources(self) -> list[str]:
        """Return the names of the polled sources."""
        return [source.name for source in self._sources]

    def silent(self) -> str:
        """Return which sources have not answered for a while, and why; empty if all answer."""
        if not self._sources:
            return "no source is polled (elastic.notices, elastic.notice_file)"
        return "; ".join(source.problem for source in self._sources if source.problem)


def _watch(source: NoticeSource) -> None:
    while True:
        begin = time.monotonic()
        source.look()
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - begin)))  # between polls


class PreemptionWatchers:
    """A run's watchers: one on each node."""

    def __init__(self, cloud: str, metadata_url: str, file: str, rebalance: bool) -> None:
        """As ``PreemptionWatcher``."""
        self._arguments = (cloud, metadata_url, file, rebalance)
        self._actors: dict[str, ActorHandle[PreemptionWatcher]] = {}
        self._asked: dict[str, ObjectRef[str]] = {}
        """Node -> pending answer: whether its watcher's sources are silent."""
        self._silent: dict[str, str] = {}
        """Node -> why its sources are silent, as last reported."""
        self._ask_at_s = 0.0

    def cover(self, nodes: set[str]) -> None:
        """Keep a watcher on each of ``nodes``, and warn of nodes with a silent source. Does not wait."""
        for node in nodes - self._actors.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(PreemptionWatcher).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            self._actors[node] = actor.remote(*self._arguments)
        for node in self._actors.keys() - nodes:
            del self._actors[node]
        self._check_sources(nodes)

    def _check_sources(self, nodes: set[str]) -> None:
        now = time.monotonic()
        if now >= self._ask_at_s:  # a watcher with a pending answer is not asked again
            self._asked = {node: actor.silent.remote() for node, actor in self._actors.items()} | self._asked
            self._ask_at_s = now + _ASK_WATCHES_S
        self._asked = {node: answer for node, answer in self._asked.items() if node in nodes}
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for node, answer in [one for one in self._asked.items() if one[1] in done]:
            del self._asked[node]
            with contextlib.suppress(RayError):  # the watcher is lost or restarts: asked later
                self._report(node, ray.get(answer))

    def _report(self, node: str, problem: str) -> None:
        if problem and not self._silent.get(node):
            _log.warning("node %s may be taken away without a notice: %s", node[:8], problem)
        elif self._silent.get(node) and not problem:
            _log.warning("node %s receives notices again", node[:8])
        self._silent[node] = problem
