"""MLflow may be late, down or gone: one run, every step once, never backwards."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_events import step
from ports import reserve

from springtide import config as configs
from springtide.config import Config
from springtide.errors import DamagedFile
from springtide.events import Evaluated, Event, Rejected, Stopped
from springtide.store import Folder
from springtide.track import mlflow_sink
from springtide.track.mlflow_results import send_scores
from springtide.track.mlflow_sink import RUN_FILE, MlflowSink, read_run_note, write_run_note


def send(config: Config, run: Folder, uri: str, earlier: list[Event], now: list[Event], grace_s: float = 60.0) -> None:
    with MlflowSink(
        configs.flatten(configs.redact(config)), run, uri, lambda: earlier, {"springtide.order": "x"}, grace_s
    ) as sink:
        for event in now:
            sink(event)


def history(uri: str, run: Folder, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    found = MlflowClient(uri).get_metric_history(run.read_json("mlflow.json")["run_id"], name)
    return [(metric.step, metric.value) for metric in found]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    changes = {"run.root": str(tmp_path), "run.id": "run", "track.retry": "200ms"}
    return configs.recipes.tiny().override(changes)


def evaluated(number: int) -> Evaluated:
    return Evaluated(step=number, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=4)


def test_restarts_are_one_run_and_steps_never_go_back(config: Config, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri, run = f"sqlite:///{tmp_path}/mlflow.db", Folder(tmp_path / "run")
    told = dataclasses.replace(step(1, 5.0), extra={"largest_logit": 9.0, "objective/kl": 0.5})
    compared = dataclasses.replace(evaluated(0), forgetting={"old": 0.25})
    first: list[Event] = [compared, told, *(step(number, 5.0) for number in range(2, 8))]
    send(config, run, uri, [], first)
    assert (history(uri, run, "train/largest_logit"), history(uri, run, "objective/kl")) == ([(1, 9.0)], [(1, 0.5)])
    assert history(uri, run, "forgetting/old") == [(0, 0.25)]
    # killed at 7, resumed from 5: 6 and 7 are trained again, and what was sent once is not sent again
    again: list[Event] = [
        Rejected(step=5, name="step-0000000006", reason="a bit flipped"),
        *(step(number, 4.0) for number in range(6, 10)),
        evaluated(9),
        Stopped(step=9, status="finished"),
    ]
    send(config, run, uri, first, again)
    assert history(uri, run, "train/loss") == [(number, 5.0) for number in range(1, 8)] + [(8, 4.0), (9, 4.0)]
    assert [number for number, _ in history(uri, run, "heldout/loss")] == [0, 9]
    scores = {"task/a b/acc": 0.5, "task/x@y/f1": 0.25}
    assert send_scores(run, uri, scores, 9, 1.0) == ""
    assert (history(uri, run, "task/a b/acc"), history(uri, run, "task/x_y/f1")) == ([(9, 0.5)], [(9, 0.25)])
    assert send_scores(run, "off", scores, 9, 1.0) == ""
    assert "reports to no MLflow run" in send_scores(Folder(tmp_path / "other"), uri, scores, 9, 1.0)
    assert "did not receive the scores" in send_scores(run, "http://127.0.0.1:9", scores, 9, 1.0)
    tags = MlflowClient(uri).get_run(run.read_json("mlflow.json")["run_id"]).data.tags
    assert tags["springtide.rejected.step-0000000006"] == "a bit flipped"
    client = MlflowClient(uri)
    [found] = client.search_runs([run.read_json("mlflow.json")["experiment_id"]])
    assert found.info.status == "FINISHED"


def test_a_run_that_is_moved_keeps_its_mlflow_run_and_a_copy_gets_one_of_its_own(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri, run, moved, copy = f"sqlite:///{tmp_path}/mlflow.db", *(Folder(tmp_path / name) for name in ("a", "b", "c"))
    send(config, run, uri, [], [step(1)])
    shutil.move(run.path, moved.path)
    send(config, moved, uri, [step(1)], [step(2)])
    assert [number for number, _ in history(uri, moved, "train/loss")] == [1, 2]
    assert caplog.text == ""
    shutil.copytree(moved.path, copy.path)
    send(config, copy, uri, [step(1), step(2)], [step(3)])
    send(config, moved, uri, [step(1), step(2)], [step(3, 9.0)])
    send(config, copy, uri, [step(number) for number in (1, 2, 3)], [step(4)])
    assert f"{copy.url} is a copy of {moved.url}" in caplog.text
    assert [number for number, _ in history(uri, copy, "train/loss")] == [1, 2, 3, 4]
    assert history(uri, moved, "train/loss")[2:] == [(3, 9.0)]


def test_a_quote_in_a_path_hides_no_run(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run, other = Folder(tmp_path / """o'brien "x" `y` %""" / "run"), Folder(tmp_path / "run")
    send(config, other, uri, [], [step(1)])
    send(config, run, uri, [], [step(1)])
    (Path(run.path) / "mlflow.json").unlink()  # killed before it was written down
    send(config, run, uri, [], [step(1), step(2)])
    assert caplog.text == ""
    assert [number for number, _ in history(uri, run, "train/loss")] == [1, 2]
    found = MlflowClient(uri).search_runs([run.read_json("mlflow.json")["experiment_id"]])
    assert {one.data.tags["springtide.run"] for one in found} == {run.url, other.url}
    assert len(found) == 2


def test_a_server_that_is_down_holds_up_nothing_and_gets_all_when_it_is_back(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow  # noqa: F401  -- seconds, the first time; the patience below is for the server

    [port] = reserve(1)
    uri, run = f"http://127.0.0.1:{port}", Folder(tmp_path / "run")
    first: list[Event] = [step(number) for number in range(1, 4)]
    begin = time.monotonic()
    send(config, run, uri, [], first, grace_s=5.0)
    assert time.monotonic() - begin < 30
    assert "cannot be reached" in caplog.text
    assert "the next --resume sends the rest" in caplog.text

    with _server(tmp_path, port):
        send(config, run, uri, first, [step(4)])
        assert [number for number, _ in history(uri, run, "train/loss")] == [1, 2, 3, 4]


def test_a_server_that_is_down_for_hours_costs_no_memory_and_gets_the_rest_from_the_journal(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_sink, "_MOST_UNSENT", 10)
    connect, attempt, kept = MlflowSink._connect, MlflowSink._try, list[int]()
    back, tried = threading.Event(), threading.Semaphore(0)

    def away(sink: MlflowSink) -> None:
        if not back.is_set():
            raise OSError("connection refused")
        connect(sink)

    def counted(sink: MlflowSink, events: list[Event], until_sent: bool) -> list[Event]:
        kept.append(len(events))
        found = attempt(sink, events, until_sent)
        tried.release()
        return found

    monkeypatch.setattr(MlflowSink, "_connect", away)
    monkeypatch.setattr(MlflowSink, "_try", counted)
    uri, run, journal = f"sqlite:///{tmp_path}/mlflow.db", Folder(tmp_path / "run"), list[Event]()
    settings = configs.flatten(configs.redact(config.override({"track.retry": "1ms"})))
    with MlflowSink(settings, run, uri, lambda: iter(journal), {}, 60.0) as sink:
        for number in range(1, 101):
            journal.append(step(number))
            sink(journal[-1])
            tried.acquire(timeout=30)
        back.set()
    assert max(kept) <= 10
    assert [number for number, _ in history(uri, run, "train/loss")] == list(range(1, 101))


@contextlib.contextmanager
def _server(folder: Path, port: int) -> Iterator[None]:
    import psutil

    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--default-artifact-root", str(folder / "art")]
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as server,
    ):
        try:
            _wait_for(server, port, folder / "server.log")
            yield
        finally:
            family = [*psutil.Process(server.pid).children(recursive=True), server]
            for process in family:
                process.terminate()
            _, alive = psutil.wait_procs(family, timeout=20)
            for process in alive:
                process.kill()


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        with (
            contextlib.suppress(OSError),  # its socket may be open before it can answer
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer,
        ):
            if answer.status == 200:
                return
        assert server.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, "the MLflow server did not answer within ninety seconds"
        time.sleep(0.1)  # until the server answers


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"run_id": null}', '{"run_id": "", "experiment_id": "1"}', '{"run_id": 5}']
)
def test_a_damaged_note_is_named_and_is_no_reason_for_a_second_run(tmp_path: Path, note: str) -> None:
    folder = Folder(tmp_path)
    assert read_run_note(folder) == ""
    folder.write(RUN_FILE, note)
    with pytest.raises(DamagedFile, match=r"mlflow\.json: .*; restore the file from a copy, or remove it"):
        read_run_note(folder)
    write_run_note(folder, "abc", "1")
    assert read_run_note(folder) == "abc"
