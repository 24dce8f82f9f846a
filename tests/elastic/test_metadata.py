"""The protocols of the clouds' metadata services, spoken to real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from metadata import Metadata, metadata

from springtide.on_ray.notices import Service, left_in

TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
NAME, EVENTS = "/metadata/instance/compute/name", "/metadata/scheduledevents"


@pytest.fixture
def cloud() -> Iterator[Metadata]:
    with metadata() as state:
        yield state


def test_aws_is_asked_with_a_token_and_with_a_new_one_when_it_is_refused(cloud: Metadata) -> None:
    cloud.answers = {TOKEN: "first"}
    cloud.headers = {
        ACTION: ("X-aws-ec2-metadata-token", "first"),
        TOKEN: ("X-aws-ec2-metadata-token-ttl-seconds", "21600"),
    }
    service = Service(cloud.url)
    assert service.aws() is None
    assert service.aws() is None
    assert cloud.asked == [f"PUT {TOKEN}", f"GET {ACTION}", f"GET {ACTION}"]
    cloud.answers = {TOKEN: "second", ACTION: '{"action": "stop", "time": "2026-11-21T08:24:00Z"}'}
    cloud.headers[ACTION] = ("X-aws-ec2-metadata-token", "second")
    with pytest.raises(OSError, match="401"):
        service.aws()
    notice = service.aws()
    assert notice is not None
    assert "stop" in notice.why


def test_a_recommendation_to_rebalance_counts_where_it_is_asked_for(cloud: Metadata) -> None:
    cloud.answers = {TOKEN: "t", REBALANCE: '{"noticeTime": "2026-11-21T08:22:00Z"}'}
    service = Service(cloud.url)
    assert service.aws() is None
    notice = service.aws(rebalance=True)
    assert notice is not None
    assert "rebalance" in notice.why


def test_gcp_and_azure_are_asked_with_their_headers(cloud: Metadata) -> None:
    cloud.answers = {PREEMPTED: "FALSE", NAME: "node-3", EVENTS: '{"DocumentIncarnation": 1, "Events": []}'}
    cloud.headers = {
        PREEMPTED: ("Metadata-Flavor", "Google"),
        NAME: ("Metadata", "true"),
        EVENTS: ("Metadata", "true"),
    }
    service = Service(cloud.url)
    assert service.gcp() is None
    assert service.azure() is None
    event = {"EventType": "Preempt", "Resources": ["node-3"], "NotBefore": "Sat, 21 Nov 2026 08:22:30 GMT"}
    cloud.answers.update({PREEMPTED: "TRUE", EVENTS: json.dumps({"Events": [event]})})
    for notice in (service.gcp(), service.azure()):
        assert notice is not None
        assert "preempt" in notice.why


def test_a_service_that_is_gone_slow_broken_or_talks_nonsense_is_an_error_in_time(cloud: Metadata) -> None:
    cloud.answers = {TOKEN: "t", PREEMPTED: "MAYBE", ACTION: "<html>"}
    service = Service(cloud.url)
    with pytest.raises(ValueError, match="MAYBE"):
        service.gcp()
    with pytest.raises(ValueError, match="Expecting value"):
        service.aws()
    cloud.status[PREEMPTED] = 503
    with pytest.raises(OSError, match="503"):
        service.gcp()
    cloud.go_on.clear()
    begin = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        service.gcp()
    assert time.monotonic() - begin < 30
    with pytest.raises(OSError, match="refused"):
        Service("http://127.0.0.1:9").gcp()


def test_a_file_is_a_notice_while_it_is_true(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert left_in(file) is None
    file.write_text("25")
    notice = left_in(file)
    assert notice is not None
    assert notice.at_s - file.stat().st_mtime == 25
    file.write_text("0")
    assert left_in(file) is None
