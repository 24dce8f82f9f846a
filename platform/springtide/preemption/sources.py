"""Sources of the notices that this machine will be taken away (preempted), polled twice a second.

    metadata service or file --every 0.5 s--> NoticeSource --> on_notice(notice)

A source that is slow, unreachable or returns an invalid answer is polled again.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from springtide.errors import look_up
from springtide.preemption.notices import (
    Notice,
    clock_ahead_s,
    notice_files,
    parse_aws_notice,
    parse_aws_rebalance,
    parse_azure_notice,
    parse_gcp_notice,
    parse_notice_file,
)

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_FILE_BYTES = 100
_SILENT_LOOKS = 20
"""Number of failed polls in a row after which a source of notices has a ``problem``. At two polls a second this takes ten
seconds, and longer if the source is slow to answer."""


def watched_files(pattern: str, node: str) -> list[Path]:
    """Return the paths of the notice files for ``node``: the file of this process's user, and root's file. Empty if ``pattern``
    is empty."""
    return [Path(name.replace("{node}", node)) for name in notice_files(pattern, os.getuid())] if pattern else []


def left_in(path: Path) -> Notice | None:
    """Return the notice in the file ``path``; None if the file does not exist or the time of its notice is past. Raises
    ValueError if it is not a regular file, because opening a FIFO would wait for a writer. Raises PermissionError if anyone but
    root and this process's user may have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a link: set elastic.notice_file to the file itself") from None
        raise
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to user {os.getuid()} or root")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.filemode(found.st_mode)
            raise PermissionError(f"{path} is ignored: other users may write to it ({mode}); run chmod go-w on it")
        return parse_notice_file(file.read(_FILE_BYTES).decode(), found.st_mtime, time.time())


class NoticeSource:
    """One metadata service or file that is polled for notices that this machine will be taken away."""

    def __init__(self, name: str, ask: Callable[[], Notice | None], on_notice: Callable[[Notice], None]) -> None:
        self.name, self._ask, self._on_notice = name, ask, on_notice
        self._failed_looks = 0
        self._warned: set[type[BaseException]] = set()
        self._last_problem = ""

    @property
    def problem(self) -> str:
        """The last error of a source whose polls have failed for a while; empty if its polls work."""
        return self._last_problem if self._failed_looks >= _SILENT_LOOKS else ""

    def look(self) -> None:
        """Poll once, and pass a notice to ``on_notice``. An error is logged, and the next poll tries again."""
        try:
            notice = self._ask()
            if notice is not None:
                self._on_notice(notice)
        except Exception as error:  # a server, a parser or Ray may raise anything, and the next poll may work
            self._failed_looks += 1
            self._last_problem = f"{self.name}: {type(error).__name__}: {str(error)[:200]}"
            if type(error) not in self._warned:  # log each type of error only once until a poll works again
                self._warned.add(type(error))
                _log.warning("%s; polling it again", self._last_problem)
        else:
            self._failed_looks, self._last_problem = 0, ""
            self._warned.clear()


def open_sources(
    cloud: str, metadata_url: str, file: str, rebalance: bool, node: str, on_notice: Callable[[Notice], None]
) -> list[NoticeSource]:
    """Return the sources of this machine's preemption notices that the settings (``elastic.notices`` etc.) select.

    Args:
        cloud: value of ``elastic.notices``; ``auto`` detects the cloud. If the cloud is unknown, no metadata service is polled.
        metadata_url: URL of the metadata service; empty: ``METADATA``, the address that all clouds use.
        file: path of a notice file, as in ``elastic.notice_file``; empty: no file is read.
        rebalance: whether a rebalance recommendation of AWS counts as a notice.
        node: the name of this node.
        on_notice: receives each notice.

    Raises:
        ConfigError: ``cloud`` is not a value of ``elastic.notices``.
    """
    service = MetadataService(metadata_url or METADATA)
    asks: dict[str, Callable[[], Notice | None]] = {
        "aws": lambda: service.aws(rebalance),
        "gcp": service.gcp,
        "azure": service.azure,
    }
    names = {**{name: name for name in ("file", "off", *asks)}, "auto": cloud_here()}
    cloud = look_up(names, "elastic.notices", cloud)
    chosen = {cloud: asks[cloud]} if cloud in asks else {}
    for name, path in zip(("file", "root's file"), watched_files(file, node), strict=False):
        chosen[name] = functools.partial(left_in, path)
    return [NoticeSource(name, ask, on_notice) for name, ask in chosen.items()]


def poll(sources: Iterable[NoticeSource]) -> None:
    """Poll each source of notices in its own thread until this process ends, so that a slow source does not delay another."""
    for source in sources:
        threading.Thread(target=_poll, args=(source,), name=f"springtide-notice-{source.name}", daemon=True).start()


def _poll(source: NoticeSource) -> None:
    while True:
        begin = time.monotonic()
        source.look()
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - begin)))  # start the next poll `_POLL_S` after this poll


# The metadata services of clouds: detect the cloud of this machine, and request notices from its service.

Cloud = Literal["aws", "gcp", "azure", ""]
METADATA = "http://169.254.169.254"
_ANSWER_S = 2.0
_FIRST_AZURE_S = 120.0
"""Timeout of this process's first request to Azure for scheduled events [s]. Azure starts to track a machine's events at its
first request, which makes that request slow."""
_TOKEN_S = 21600
_VENDORS = {"Amazon EC2": "aws", "Google": "gcp"}
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def cloud_here() -> Cloud:
    """Return the cloud of this machine, detected from the firmware's vendor strings; empty if unknown. Uses no network."""

    def firmware(name: str) -> str:
        with contextlib.suppress(OSError):
            return Path("/sys/class/dmi/id", name).read_text().strip()
        return ""

    if firmware("chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    found = _VENDORS.get(firmware("sys_vendor"), "")
    return "aws" if found == "aws" else "gcp" if found == "gcp" else ""


class MetadataService:
    """Client of a cloud's metadata service, which publishes preemption notices. It connects directly and ignores proxy
    settings."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token = ""
        self._machine = ""
        self._asked = False
        self._ahead_s = 0.0
        """How far the service's clock was ahead of this machine's clock in the last response [s]."""

    def aws(self, rebalance: bool = False) -> Notice | None:
        """Return the notice of AWS's metadata service (IMDSv2), None if there is none. ``rebalance``: if there is no notice,
        return a rebalance recommendation (the instance may be taken away) if AWS has made one."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._ask("/latest/api/token", ttl, method="PUT") or ""
        token = {"X-aws-ec2-metadata-token": self._token}
        try:
            answer = self._ask("/latest/meta-data/spot/instance-action", token)
            if answer is not None:
                return self._by_this_clock(parse_aws_notice(answer))
            answer = self._ask("/latest/meta-data/events/recommendations/rebalance", token) if rebalance else None
            return self._by_this_clock(parse_aws_rebalance(answer)) if answer is not None else None
        except urllib.error.HTTPError as error:
            if error.code == 401:  # unauthorized: the token has expired, or is from before a reboot
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
        notice = None
        if answer is not None:
            notice = parse_azure_notice(answer, self._machine, time.time() + self._ahead_s)
        return self._by_this_clock(notice) if notice is not None else None

    def _by_this_clock(self, notice: Notice) -> Notice:
        """Convert the time of a notice from the service's clock to this machine's clock."""
        return notice._replace(at_s=notice.at_s - self._ahead_s)

    def _ask(
        self, path: str, headers: dict[str, str], method: str = "GET", patience_s: float = _ANSWER_S
    ) -> str | None:
        """Return the text of the response to a request for ``path``; None for 404. Raises OSError for any other failure."""
        request, sent_s = urllib.request.Request(self._url + path, headers=headers, method=method), time.time()
        try:
            with self._open(request, timeout=patience_s) as answer:
                self._ahead_s = clock_ahead_s(answer.headers.get("Date", ""), sent_s, time.time())
                return str(answer.read(2**16).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
