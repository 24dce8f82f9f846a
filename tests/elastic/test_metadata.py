"""The protocols of the clouds' metadata services, spoken to real servers."""

from __future__ import annotations

import datetime as dt
import email.utils
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from metadata import Metadata, metadata
from ray.exceptions import RpcError

from springtide.preemption import MetadataService, NoticeSource, left_in
from springtide.preemption.notices import Notice
from springtide.ray.cluster.watchers import Relay

TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
NAME, EVENTS = "/metadata/instance/compute/name", "/metadata/scheduledevents"
PREEMPT = {"EventType": "Preempt", "Resources": ["me"]}


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
    service = MetadataService(cloud.url)
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


@pytest.mark.parametrize(
    ("ahead_s", "left_s"),
    [(-100, (219.0, 221.0)), (0, (119.0, 121.0)), (7, (112.0, 113.9)), (10**7, (119.0, 121.0))],
    ids=["behind", "the same", "ahead", "nonsense"],
)
def test_the_time_of_a_notice_is_by_the_clock_of_who_gives_it(
    cloud: Metadata, ahead_s: int, left_s: tuple[float, float]
) -> None:
    """Two minutes by the cloud's clock are two minutes here, whatever this machine's clock shows: at most one second less."""
    now = time.time()
    cloud.date = email.utils.formatdate(now + ahead_s, usegmt=True)
    ends = dt.datetime.fromtimestamp(now + 120, tz=dt.UTC)  # two minutes by this clock
    cloud.answers = {TOKEN: "t", ACTION: json.dumps({"action": "stop", "time": ends.isoformat()})}
    notice = MetadataService(cloud.url).aws()
    assert notice is not None
    assert left_s[0] <= notice.at_s - now <= left_s[1]
    cloud.answers = {
        NAME: "me",
        EVENTS: json.dumps({"Events": [{**PREEMPT, "NotBefore": email.utils.format_datetime(ends)}]}),
    }
    notice = MetadataService(cloud.url).azure()
    assert notice is not None
    assert left_s[0] - 1.0 <= notice.at_s - now <= left_s[1]


def test_an_event_that_has_begun_is_now_whatever_the_clocks_show(cloud: Metadata) -> None:
    cloud.date = email.utils.formatdate(time.time() - 600, usegmt=True)
    cloud.answers = {NAME: "me", EVENTS: json.dumps({"Events": [{**PREEMPT, "NotBefore": ""}]})}
    begin = time.time()
    notice = MetadataService(cloud.url).azure()
    assert notice is not None
    assert begin - 0.01 <= notice.at_s <= time.time() + 0.01


@pytest.mark.parametrize("date", ["", "yesterday", "Sat, 99 Nov 2026 08:22:30 GMT", "\u00ff" * 100])
def test_an_answer_without_a_time_that_can_be_read_is_an_answer(cloud: Metadata, date: str) -> None:
    cloud.date, cloud.answers = date, {PREEMPTED: "TRUE", TOKEN: "t", ACTION: '{"time": "2026-11-21T08:24:00Z"}'}
    assert MetadataService(cloud.url).gcp() is not None
    notice = MetadataService(cloud.url).aws()
    assert notice is not None
    assert notice.at_s == dt.datetime(2026, 11, 21, 8, 24, tzinfo=dt.UTC).timestamp()


def test_a_recommendation_to_rebalance_counts_where_it_is_asked_for(cloud: Metadata) -> None:
    cloud.answers = {TOKEN: "t", REBALANCE: '{"noticeTime": "2026-11-21T08:22:00Z"}'}
    service = MetadataService(cloud.url)
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
    service = MetadataService(cloud.url)
    assert service.gcp() is None
    assert service.azure() is None
    event = {"EventType": "Preempt", "Resources": ["node-3"], "NotBefore": "Sat, 21 Nov 2026 08:22:30 GMT"}
    cloud.answers.update({PREEMPTED: "TRUE", EVENTS: json.dumps({"Events": [event]})})
    for notice in (service.gcp(), service.azure()):
        assert notice is not None
        assert "preempt" in notice.why


def test_a_service_that_is_gone_slow_broken_or_talks_nonsense_is_an_error_in_time(cloud: Metadata) -> None:
    cloud.answers = {TOKEN: "t", PREEMPTED: "MAYBE", ACTION: "<html>"}
    service = MetadataService(cloud.url)
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
        MetadataService("http://127.0.0.1:9").gcp()


def test_a_file_is_a_notice_while_it_is_true(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert left_in(file) is None
    file.write_text("25")
    notice = left_in(file)
    assert notice is not None
    assert notice.at_s - file.stat().st_mtime == 25
    file.write_text("0")
    assert left_in(file) is None


def test_a_notice_file_of_any_kind_neither_blocks_nor_fills_memory(tmp_path: Path) -> None:
    fifo, sparse, folder = tmp_path / "fifo", tmp_path / "sparse", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    with sparse.open("wb") as file:
        file.write(b"25")
        file.truncate(8 * 2**30)
    heard: list[Notice] = []
    for path, problem in (
        (fifo, "not a regular file"),
        (folder, "not a regular file|directory"),
        (sparse, "not a number of seconds"),
    ):
        source = NoticeSource("file", lambda path=path: left_in(path), heard.append)  # type: ignore[misc]
        looking = threading.Thread(target=source.look, daemon=True)
        looking.start()
        looking.join(20)
        assert not looking.is_alive(), f"the look at {path.name} does not end"
        with pytest.raises((ValueError, OSError), match=problem):
            left_in(path)
    fifo.unlink()
    fifo.write_text("25")
    NoticeSource("file", lambda: left_in(fifo), heard.append).look()
    assert [notice.at_s - fifo.stat().st_mtime for notice in heard] == [25]


def test_a_notice_that_ray_did_not_take_is_told_again_until_it_is(caplog: pytest.LogCaptureFixture) -> None:
    fails, told = [RpcError("GCS is away"), RpcError("GCS is away"), OSError("refused")], list[float]()

    def drain(at_s: float, why: str) -> None:
        if fails:
            raise fails.pop(0)
        told.append(at_s)

    at_s = time.time() + 60
    source = NoticeSource("gcp", lambda: Notice(at_s, "it goes"), Relay(drain))
    for _ in range(6):
        source.look()
    assert told == [at_s]
    assert [record.message.split(":")[1] for record in caplog.records] == [" RpcError", " OSError"]


@pytest.mark.parametrize(
    "error",
    [
        http.client.BadStatusLine("what"),
        RecursionError(),
        TypeError("null"),
        MemoryError(),
        RpcError("away"),
        KeyError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_look_may_fail_in_any_way_and_the_next_one_hears(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | Notice] = [error] * 25
    heard: list[Notice] = []

    def ask() -> Notice | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    source = NoticeSource("aws", ask, heard.append)
    for _ in range(25):
        source.look()
    assert source.problem.startswith(f"aws: {type(error).__name__}")
    assert len(caplog.records) == 1
    notice = Notice(time.time() + 9, "it goes")
    answers.append(notice)
    source.look()
    assert (heard, source.problem) == ([notice], "")


def test_a_server_that_speaks_no_http_is_asked_again(cloud: Metadata) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:
        service = MetadataService(f"http://127.0.0.1:{rude.getsockname()[1]}")

        def answer() -> None:
            connection, _ = rude.accept()
            connection.recv(2**16)
            connection.sendall(b"what is this\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        heard: list[Notice] = []
        source = NoticeSource("gcp", service.gcp, heard.append)
        source.look()
        thread.join()
    cloud.answers = {PREEMPTED: "TRUE"}
    service._url = cloud.url
    source.look()
    assert len(heard) == 1
