"""The metadata services of clouds: which cloud this machine belongs to, and what it says of this machine's end."""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from springtide.elastic.notices import (
    Notice,
    clock_ahead_s,
    parse_aws_notice,
    parse_aws_rebalance,
    parse_azure_notice,
    parse_gcp_notice,
)

Cloud = Literal["aws", "gcp", "azure", ""]
METADATA = "http://169.254.169.254"
_ANSWER_S = 2.0
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
        self._ahead_s = 0.0
        """By how much its clock was ahead of this machine's at the last answer [s]."""

    def aws(self, rebalance: bool = False) -> Notice | None:
        """Return the notice of AWS's IMDSv2, None if there is none; ``rebalance``: its rebalance recommendation counts, too."""
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
        notice = None
        if answer is not None:
            notice = parse_azure_notice(answer, self._machine, time.time() + self._ahead_s)
        return self._by_this_clock(notice) if notice is not None else None

    def _by_this_clock(self, notice: Notice) -> Notice:
        """Return a notice of the service's clock with its time by the clock of this machine."""
        return notice._replace(at_s=notice.at_s - self._ahead_s)

    def _ask(
        self, path: str, headers: dict[str, str], method: str = "GET", patience_s: float = _ANSWER_S
    ) -> str | None:
        """Return the answer; None for 404. Raises OSError for any other failure."""
        request, sent_s = urllib.request.Request(self._url + path, headers=headers, method=method), time.time()
        try:
            with self._open(request, timeout=patience_s) as answer:
                self._ahead_s = clock_ahead_s(answer.headers.get("Date", ""), sent_s, time.time())
                return str(answer.read(2**16).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
