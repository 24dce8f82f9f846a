"""One small actor a node, which hears that the node will be taken away and tells Ray: a drain with the deadline.

    metadata service or file --every half second--> Watch --drain_node(deadline)--> Ray --> the policies of every run

A service that is slow, gone or talks nonsense is asked again; what it last said stands until it says something else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.elastic.notices import Notice, of_aws, of_aws_rebalance, of_azure, of_file, of_gcp
from springtide.on_ray.nodes import drain

_log = logging.getLogger(__name__)

Cloud = Literal["aws", "gcp", "azure", ""]
METADATA = "http://169.254.169.254"
_POLL_S = 0.5
_ANSWER_S = 2.0
_FIRST_AZURE_S = 120.0
"""The first time a machine asks for its events Azure begins to watch them, and takes so long."""
_TOKEN_S = 21600
_VENDORS = {"Amazon EC2": "aws", "Google": "gcp"}
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def cloud_here() -> Cloud:
    """Which cloud this machine is of, from what its firmware says; no network is asked."""

    def told(name: str) -> str:
        with contextlib.suppress(OSError):
            return Path("/sys/class/dmi/id", name).read_text().strip()
        return ""

    if told("chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    found = _VENDORS.get(told("sys_vendor"), "")
    return "aws" if found == "aws" else "gcp" if found == "gcp" else ""


class Service:
    """A metadata service. Proxies are for other addresses."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token = ""
        self._machine = ""
        self._asked = False

    def aws(self, rebalance: bool = False) -> Notice | None:
        """What IMDSv2 says."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._ask("/latest/api/token", ttl, method="PUT") or ""
        token = {"X-aws-ec2-metadata-token": self._token}
        try:
            answer = self._ask("/latest/meta-data/spot/instance-action", token)
            if answer is not None:
                return of_aws(answer)
            answer = self._ask("/latest/meta-data/events/recommendations/rebalance", token) if rebalance else None
            return of_aws_rebalance(answer) if answer is not None else None
        except urllib.error.HTTPError as error:
            if error.code == 401:  # the token is too old, or of another boot
                self._token = ""
            raise

    def gcp(self) -> Notice | None:
        """What the metadata server says."""
        answer = self._ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return of_gcp(answer, time.time()) if answer is not None else None

    def azure(self) -> Notice | None:
        """What the scheduled events say of this machine."""
        header = {"Metadata": "true"}
        if not self._machine:
            where = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = self._ask(where, header) or ""
        patience_s = _ANSWER_S if self._asked else _FIRST_AZURE_S
        answer = self._ask("/metadata/scheduledevents?api-version=2020-07-01", header, patience_s=patience_s)
        self._asked = True
        return of_azure(answer, self._machine, time.time()) if answer is not None else None

    def _ask(
        self, path: str, headers: dict[str, str], method: str = "GET", patience_s: float = _ANSWER_S
    ) -> str | None:
        """The answer; None for 404. OSError for any other that is not one."""
        request = urllib.request.Request(self._url + path, headers=headers, method=method)
        try:
            with self._open(request, timeout=patience_s) as answer:
                return str(answer.read(2**16).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def left_in(path: Path) -> Notice | None:
    """What a file says, if it is there."""
    try:
        return of_file(path.read_text()[:100], path.stat().st_mtime, time.time())
    except FileNotFoundError:
        return None


class Watch:
    """One a node and run; it ends with the run's controller."""

    def __init__(self, cloud: str, metadata_url: str, file: str, rebalance: bool) -> None:
        """``cloud``: auto finds out. ``file``: ``{node}`` in it stands for the node's id."""
        context = ray.get_runtime_context()
        self._node, self._gcs = context.get_node_id(), context.gcs_address
        self._told: Notice | None = None
        self._lock = threading.Lock()
        service = Service(metadata_url or METADATA)
        asks: dict[str, Callable[[], Notice | None]] = {
            "aws": lambda: service.aws(rebalance),
            "gcp": service.gcp,
            "azure": service.azure,
        }
        cloud = cloud_here() if cloud == "auto" else cloud
        self._sources = {cloud: asks[cloud]} if cloud in asks else {}
        if file:
            self._sources["file"] = lambda: left_in(Path(file.replace("{node}", self._node)))
        for name, ask in self._sources.items():
            threading.Thread(target=self._watch, args=(name, ask), daemon=True).start()

    def sources(self) -> list[str]:
        """Who is asked."""
        return list(self._sources)

    def _watch(self, name: str, ask: Callable[[], Notice | None]) -> None:
        complained = False
        while True:
            begin = time.monotonic()
            try:
                notice = ask()
                if notice is not None:
                    self._tell(notice)
                complained = False
            except (OSError, ValueError) as error:
                if not complained:
                    _log.warning("node %s: %s cannot be understood: %s; it is asked again", self._node, name, error)
                complained = True
            time.sleep(max(0.0, _POLL_S - (time.monotonic() - begin)))  # between looks

    def _tell(self, notice: Notice) -> None:
        with self._lock:
            # a service that gives no time gives a new one each time it is asked: the first counts
            if self._told is not None and notice.at_s >= self._told.at_s:
                return
            drain(self._gcs, self._node, max(notice.at_s, time.time() + 1.0), notice.why)
            self._told = notice


class Watches:
    """The watches of a run: one on each node that there is."""

    def __init__(self, *arguments: Any) -> None:
        """``arguments``: of ``Watch``."""
        self._arguments = arguments
        self._actors: dict[str, Any] = {}

    def cover(self, nodes: set[str]) -> None:
        """Have one on each of ``nodes``."""
        for node in nodes - self._actors.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(Watch).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            self._actors[node] = actor.remote(*self._arguments)
        for node in self._actors.keys() - nodes:
            del self._actors[node]
