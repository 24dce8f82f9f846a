"""Who may read a run's page, and what is said of a run that has none."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_events import step

from springtide import config as configs
from springtide.cli.main import main
from springtide.errors import ConfigError
from springtide.events import Event, Saved, Stopped
from springtide.report.run_page import RunFacts
from springtide.run.folder import Run
from springtide.run.live_page import LivePage
from springtide.run.page_facts import facts_of
from springtide.run.page_server import PageServer
from springtide.store import Folder
from springtide.track.journal import Journal


def made(root: Path) -> Run:
    """A run's folder without events."""
    run = Run(Folder(root / "runs") / "shown")
    run.write_config(configs.recipe("tiny").override({"run.id": "shown", "run.root": str(root / "runs")}))
    return run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    """A server of a run of three steps."""
    run = made(tmp_path)
    with Journal(run.folder) as journal:
        for number in (1, 2, 3):
            journal(step(number))
    with PageServer(run) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str = "/TOKEN/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body of the answer to a request as a browser here would send it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path.replace("TOKEN", server.token), headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_comes_with_headers_that_shut_others_out(server: PageServer) -> None:
    status, headers, body = ask(server)
    assert status == 200
    assert b"Content-Security-Policy" in body
    assert b"default-src 'none'" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Server"] == "springtide"
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, method="HEAD")[::2] == (200, b"")


def test_without_the_token_there_is_nothing(server: PageServer) -> None:
    for path in (
        "/",
        "/wrong/",
        "/wrong/data",
        f"/{server.token[:-1]}/",
        "/data?token=TOKEN",
        "/%00/",
    ):
        status, _, body = ask(server, path)
        assert status == 403, path
        assert b"wrong token: open the address that springtide report --serve printed" in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.", "[::2]:1"]
)
def test_another_name_of_this_machine_is_refused(server: PageServer, host: str) -> None:
    """A page elsewhere may let its own name point to 127.0.0.1."""
    assert ask(server, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:80", "[::1]"])
def test_a_tunnel_may_end_at_another_port(server: PageServer, host: str) -> None:
    assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server: PageServer, method: str) -> None:
    status, headers, _ = ask(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["../config.yaml", "config.yaml", "..%2fconfig.yaml", "data/../../config.yaml", "journal/"]
)
def test_no_file_can_be_reached(server: PageServer, path: str) -> None:
    status, _, body = ask(server, f"/TOKEN/{path}")
    assert status == 404
    assert b"format" not in body


def test_only_what_is_new_is_sent(server: PageServer) -> None:
    first = json.loads(ask(server, "/TOKEN/data")[2])
    assert (first["version"], first["last"], first["over"]) == (1, 3, False)
    again = json.loads(ask(server, "/TOKEN/data?have=1")[2])
    assert again.keys() == {"version", "over", "wait_s"}
    for odd in ("-1", "x", "9" * 400, "%00"):
        assert json.loads(ask(server, f"/TOKEN/data?have={odd}")[2])["last"] == 3


def test_a_refresh_sends_points_from_the_first_changed_step_on(tmp_path: Path) -> None:
    run, now = made(tmp_path), [0.0]
    page = LivePage(run, lambda: now[0])
    with Journal(run.folder) as journal:
        for number in range(1, 101):
            journal(step(number))
        first = page.update(0)
        for number in (*range(91, 121),):
            journal(step(number, 9.0))
        assert page.update(0)["version"] == first["version"], "within a second of the first"
        now[0] = 2.0
        second = page.update(first["version"])
        x, y = (second["charts"][0]["series"][1][axis] for axis in "xy")
        assert second["from"] == 91
        assert x == [*range(91, 121)]
        assert set(y) == {9.0}
        assert "figures" in second["parts"]
        assert "config" not in second["parts"], "unchanged"
        journal(Stopped(step=120, status="finished"))
        now[0] = 4.0
        last = page.update(second["version"])
    assert last["over"]
    assert page.update(0)["from"] == 0


def test_what_came_while_the_store_was_away_is_in_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, fails = made(tmp_path), [0.0], [False]
    page = LivePage(run, lambda: now[0])

    def facts(*given: object, **named: object) -> RunFacts:
        if fails.pop():
            raise OSError("the store is away")
        return facts_of(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("springtide.run.live_page.facts_of", facts)

    def look(have: int, *events: Event) -> dict[str, Any]:
        """What a browser hears that asks twice: the first time the store is away."""
        for event in events:
            journal(event)
        now[0] += 2.0
        fails[:] = [False, True]
        with pytest.raises(OSError, match="away"):
            page.update(have)
        return page.update(have)

    with Journal(run.folder) as journal:
        for number in range(1, 11):
            journal(step(number))
        fails[:] = [False]
        assert page.update(0)["version"] == 1
        saved = Saved(step=20, name="step-0000000020", size_bytes=1, save_time_s=1.0)
        found = look(1, *(step(number) for number in range(11, 21)), saved)
        assert (found["version"], found["from"], found["last"]) == (2, 11, 20)
        assert found["charts"][0]["series"][1]["x"] == [*range(11, 21)]
        found = look(2, Stopped(step=20, status="finished"))
    assert found["over"]
    assert "finished" in found["parts"]["about"]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    run, now = made(tmp_path), [0.0]
    with Journal(run.folder) as journal:
        journal(step(1))
        journal(step(2))
    segment = Path(run.folder.where("journal/0001-0000.jsonl"))
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-20])
    page = LivePage(run, lambda: now[0])
    assert page.update(0)["last"] == 1
    segment.write_bytes(whole)
    now[0] = 2.0
    assert page.update(1)["last"] == 2


def test_a_taken_port_and_a_missing_run_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["report", run.folder.url, "--serve", "--port", str(port)]) == 2
    assert main(["report", run.folder.url, "--serve", "--port", "70000"]) == 2
    assert main(["report", str(tmp_path / "none"), "--serve"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [part in line for part, line in zip(("taken", "not a port", "not a run"), said, strict=True)] == [True] * 3


def test_a_damaged_config_is_said_before_a_browser_opens(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.folder.write("config.yaml", "nonsense: [")
    with PageServer(run) as server, pytest.raises(ConfigError, match=r"config\.yaml"):
        server.page.update(0)


def test_ctrl_c_ends_it_well(tmp_path: Path) -> None:
    run = made(tmp_path)
    command = [sys.executable, "-m", "springtide.cli.main", "report", run.folder.url, "--serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        line = serving.stdout.readline()
        assert line.startswith("run shown: http://127.0.0.1:")
        url = line.split()[2]
        connection = http.client.HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0]), timeout=60)
        connection.request("GET", "/" + url.split("/", 3)[3])
        assert b"Nothing happened yet" in connection.getresponse().read()
        connection.close()
        serving.send_signal(signal.SIGINT)
        try:
            assert serving.wait(60) == 0
        finally:
            serving.kill()  # or the block would wait for it
        assert serving.stderr.read() == ""
