"""MLflow may be late, down, full or closed: one run, every step once, never backwards, one warning each."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import math
import resource
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journal_events import step
from mlflow_server import history

from springtide import config as configs
from springtide.config import Config
from springtide.errors import DamagedFile
from springtide.events import Evaluated, Event, Rejected, Started, Stopped
from springtide.storage import Folder
from springtide.tracking import mlflow_sink
from springtide.tracking.mlflow_sink import RUN_FILE, MlflowSink, read_run_note, write_run_note


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """MLflow, whose import takes seconds: the graces below are for its server."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def send(
    config: Config,
    run: Folder,
    uri: str,
    earlier: list[Event],
    now: list[Event],
    grace_s: float = 60.0,
    once: Callable[[], bool] | None = None,
) -> None:
    """Send events, and end when all are sent or the grace is over, but not before ``once`` holds."""
    with MlflowSink(
        configs.flatten(configs.redact(config)), run, uri, lambda: earlier, {"springtide.order": "x"}, grace_s
    ) as sink:
        for event in now:
            sink(event)
        end_s = time.monotonic() + 120
        while once and not once():
            assert time.monotonic() < end_s
            time.sleep(0.02)  # between looks at what the thread says


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sqlite file with MLflow's tables, which take seconds to create."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path) -> str:
    """The URI of a store that no run has reported to."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(mlflow_sink, "_RETRY_S", 0.2)
    return configs.recipes.tiny().override({"run.root": str(tmp_path), "run.id": "run"})


def evaluated(number: int) -> Evaluated:
    return Evaluated(step=number, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=4)


def test_restarts_are_one_run_and_steps_never_go_back(config: Config, uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = Folder(tmp_path / "run")
    told = dataclasses.replace(step(1, 5.0), extra={"largest_logit": 9.0, "objective/kl": 0.5, "objective/x@y": 0.25})
    compared = dataclasses.replace(evaluated(0), forgetting={"old": 0.25})
    first: list[Event] = [compared, told, *(step(number, 5.0) for number in range(2, 8))]
    send(config, run, uri, [], first)
    assert (history(uri, run, "train/largest_logit"), history(uri, run, "train/objective/kl")) == (
        [(1, 9.0)],
        [(1, 0.5)],
    )
    assert history(uri, run, "train/objective/x_y") == [(1, 0.25)]  # of a character that MLflow does not take
    assert history(uri, run, "heldout/forgetting/old") == [(0, 0.25)]
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
    tags = MlflowClient(uri).get_run(run.read_json("mlflow.json")["run_id"]).data.tags
    assert tags["springtide.rejected.step-0000000006"] == "a bit flipped"
    client = MlflowClient(uri)
    [found] = client.search_runs([run.read_json("mlflow.json")["experiment_id"]])
    assert found.info.status == "FINISHED"


def test_a_moved_run_keeps_its_mlflow_run_but_a_copy_does_not(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is moved keeps its MLflow run and a copy gets one of its own."""
    run, moved, copy = (Folder(tmp_path / name) for name in ("a", "b", "c"))
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


def test_a_server_does_not_choose_what_is_opened(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tag with the folder of an MLflow run may have been changed by others: no URL on another host is opened for it, but
    for one that the folder's own note belongs to."""
    from mlflow import MlflowClient

    run, copy, other = Folder(tmp_path / "a"), Folder(tmp_path / "b"), Folder(f"memory://{tmp_path.name}/elsewhere")
    send(config, run, uri, [], [step(1)])
    shutil.copytree(run.path, copy.path)
    other.write(RUN_FILE, run.read(RUN_FILE))
    run_id = read_run_note(run)
    MlflowClient(uri).set_tag(run_id, "springtide.run", other.url)
    send(config, copy, uri, [step(1)], [step(2)])
    assert "copy of" not in caplog.text
    assert read_run_note(copy) == run_id

    MlflowClient(uri).set_tag(run_id, "springtide.run", other.url)
    write_run_note(other, run_id, "1")
    copy.write(RUN_FILE, other.read(RUN_FILE))
    send(config, copy, uri, [step(1), step(2)], [step(3)])
    assert f"{copy.url} is a copy of {other.url}" in caplog.text


def test_a_quote_in_a_path_hides_no_run(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

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


def test_a_full_queue_drops_its_oldest_events_which_the_journal_has(
    config: Config, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try hangs at a database that another process has locked: the queue is bounded meanwhile, not only between tries."""
    monkeypatch.setattr(mlflow_sink, "_MOST_UNSENT", 10)
    run, journal = Folder(tmp_path / "run"), list[Event]()
    monkeypatch.setattr(mlflow_sink, "_RETRY_S", 0.001)
    settings = configs.flatten(configs.redact(config))
    other = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with MlflowSink(settings, run, uri, lambda: iter(journal), {}, 60.0) as sink:
        for number in range(1, 101):
            journal.append(step(number))
            sink(journal[-1])
            assert len(sink._queue) <= 10
        assert sink.num_dropped == 90
        other.close()
    assert [number for number, _ in history(uri, run, "train/loss")] == list(range(1, 101))


def test_dropped_events_are_read_from_the_journal(
    config: Config, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events dropped while others are sent are read from the journal too."""
    monkeypatch.setattr(mlflow_sink, "_MOST_UNSENT", 3)
    run, journal = Folder(tmp_path / "run"), list[Event]()
    with MlflowSink(configs.flatten(configs.redact(config)), run, uri, lambda: list(journal), {}, 60.0) as sink:
        for number in range(1, 301):  # faster than a request takes
            journal.append(step(number))
            sink(journal[-1])
    assert sink.num_dropped > 0
    assert [number for number, _ in history(uri, run, "train/loss")] == list(range(1, 301))


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"run_id": null}', '{"run_id": "", "experiment_id": "1"}', '{"run_id": 5}']
)
def test_a_damaged_note_does_not_cause_a_second_run(tmp_path: Path, note: str) -> None:
    """A damaged note is named and is no reason for a second run."""
    folder = Folder(tmp_path)
    assert read_run_note(folder) == ""
    folder.write(RUN_FILE, note)
    with pytest.raises(DamagedFile, match=r"mlflow\.json: "):
        read_run_note(folder)
    write_run_note(folder, "abc", "1")
    assert read_run_note(folder) == "abc"


def test_a_run_of_earlier_names_keeps_them(config: Config, uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = Folder(tmp_path / "run")
    send(config, run, uri, [], [step(1)])
    MlflowClient(uri).delete_tag(read_run_note(run), "springtide.metric_names")  # as an earlier version created it
    send(config, run, uri, [step(1)], [step(2)])
    assert history(uri, run, "train/loss") == [(1, 1.0)]
    assert history(uri, run, "loss") == [(2, 1.0)]


def test_a_run_of_grouped_names_keeps_those_of_its_sources(config: Config, uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run, named = Folder(tmp_path / "run"), [dataclasses.replace(step(one), extra={"loss/web": 2.0}) for one in (1, 2)]
    send(config, run, uri, [], named[:1])
    MlflowClient(uri).set_tag(read_run_note(run), "springtide.metric_names", "grouped")
    send(config, run, uri, named[:1], named[1:])
    assert history(uri, run, "train/loss") == [(1, 1.0), (2, 1.0)]
    assert (history(uri, run, "train/loss/web"), history(uri, run, "loss/web")) == ([(1, 2.0)], [(2, 2.0)])
    assert history(uri, run, "train/loss_scale") == [(2, 1.0)], "a run of now tells it in fp16 only"


def test_what_a_user_chose_in_mlflow_stays(config: Config, uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client, run = MlflowClient(uri), Folder(tmp_path / "run")
    experiment = client.create_experiment("springtide", tags={"mlflow.experimentKind": "finetuning"})
    begun = Started(step=0, world_size=2)
    send(config, run, uri, [], [begun, step(1)])
    client.set_tag(read_run_note(run), "mlflow.note.content", "mine")
    changed = config.override({"train.sample_tokens": 8})
    send(changed, run, uri, [begun, step(1)], [begun, step(2)])
    send(config, run, uri, [begun, step(1), step(2)], [step(3)])
    tags = client.get_run(read_run_note(run)).data.tags
    assert tags["mlflow.note.content"] == "mine"
    assert client.get_experiment(experiment).tags["mlflow.experimentKind"] == "finetuning"
    assert tags["springtide.now.train.sample_tokens"] == "32", "set back to what the run began with"


def test_ten_thousand_restarts_and_rejections_are_a_few_requests(
    config: Config, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    requests, log_batch = [], MlflowClient.log_batch

    def counted(client: MlflowClient, run_id: str, *batch: Any, **named: Any) -> None:
        requests.append(run_id)
        log_batch(client, run_id, *batch, **named)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    run, journal = Folder(tmp_path / "run"), list[Event]()
    for number in range(10_000):
        journal += [Started(step=0, world_size=2), Rejected(step=0, name=f"step-{number:010d}", reason="a bit flipped")]
    send(config, run, uri, [*journal, step(1)], [step(2)])
    assert len(requests) < 10
    assert [number for number, _ in history(uri, run, "train/loss")] == [1, 2]
    tags = MlflowClient(uri).get_run(read_run_note(run)).data.tags
    assert tags["springtide.rejected.step-0000009999"] == "a bit flipped"
    assert len(tags) < 150


def test_values_beyond_mlflow_limits_are_cut(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values beyond the limits of MLflow are cut and hold up nothing."""
    run = Folder(tmp_path / "run")
    long = config.override({"corpus.source": "/" + "x" * 10_000, "track.experiment": "e" * 400})
    odd = {"loss/" + "n" * 400: 1.0, "loss/../x": 2.0, "loss/#\u00e9\n": 3.0, "objective/nan": math.nan, "/": 4.0}
    said = [Rejected(step=1, name="../" + "k" * 400, reason="v" * 100_000), Started(step=0, world_size=2)]
    send(
        long,
        run,
        uri,
        [],
        [*said, dataclasses.replace(step(1), extra=odd), step(2), Stopped(step=2, status="finished")],
    )
    assert [record.getMessage() for record in caplog.records] == []
    assert history(uri, run, "train/loss/_/x") == [(1, 2.0)]
    assert history(uri, run, "train/loss/___") == [(1, 3.0)]
    assert [number for number, _ in history(uri, run, "train/loss")] == [1, 2]


def test_a_refused_batch_is_skipped(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is refused is skipped and the next is sent."""
    monkeypatch.setitem(
        mlflow_sink._NAMING, mlflow_sink._PRESENT, lambda name: name
    )  # a name that MLflow refuses gets through
    run = Folder(tmp_path / "run")
    send(config, run, uri, [], [dataclasses.replace(step(1), extra={"loss/#": 1.0})])
    send(config, run, uri, [step(1)], [step(2)])
    assert [number for number, _ in history(uri, run, "loss")] == [2]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "from step 1 to 1 (" in warning
    assert warning.endswith("later ones are sent")


def test_a_full_disk_is_one_warning_and_loses_nothing(
    config: Config, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is one warning and the rest comes when there is room."""
    run, before = Folder(tmp_path / "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    send(config, run, uri, [], [step(1)])
    size = (tmp_path / "mlflow.db").stat().st_size
    many: list[Event] = [step(number) for number in range(2, 300)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # the file can grow no more
    try:
        send(config, run, uri, [step(1)], many, grace_s=0.5, once=lambda: "cannot be reached" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    warned = [record.getMessage() for record in caplog.records]
    assert [message.split(" (")[0] for message in warned] == [
        f"MLflow at {uri} cannot be reached",
        f"MLflow at {uri} did not receive everything; the next --resume sends the rest",
    ]
    assert len(warned[0]) < 700
    send(config, run, uri, [step(1), *many], [])
    assert [number for number, _ in history(uri, run, "train/loss")] == list(range(1, 300))


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_password_is_one_warning(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """A server that wants a password is one warning that says how to give it."""

    class Closed(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        uri = f"http://me:hunter2@127.0.0.1:{server.server_port}"
        given = config, Folder(tmp_path / "run"), uri, [], [step(1), step(2)]
        send(*given, grace_s=0.5, once=lambda: "metrics are kept" in caplog.text)
        server.shutdown()
        thread.join()
    first, last = (record.getMessage() for record in caplog.records)
    remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    assert first.endswith(f"; {remedy}; training continues, metrics are kept")
    assert "everything" in last
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("uri", ["nonsense://x", "http://", "sqlite:////proc/none/mlflow.db"])
def test_a_wrong_uri_is_one_warning(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, uri: str) -> None:
    given = config, Folder(tmp_path / "run"), uri, [], [step(1), step(2)]
    send(*given, grace_s=0.3, once=lambda: "cannot be reached" in caplog.text)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("springtide")]
    assert [message.split(" (")[0] for message in ours] == [
        f"MLflow at {uri} cannot be reached",
        f"MLflow at {uri} did not receive everything; the next --resume sends the rest",
    ]


def test_the_load_of_the_node_continues_after_a_restart(
    config: Config, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of the node is measured and goes on after a restart."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")  # which is a minute otherwise
    run = Folder(tmp_path / "run")

    def measured(least: int) -> bool:
        return run.exists(RUN_FILE) and len(history(uri, run, "system/system_memory_usage_percentage")) >= least

    send(config, run, uri, [], [step(1)], once=lambda: measured(2))
    before = len(history(uri, run, "system/system_memory_usage_percentage"))
    send(config, run, uri, [step(1)], [step(2)], once=lambda: measured(before + 2))
    found = history(uri, run, "system/system_memory_usage_percentage")
    assert all(after > before for (before, _), (after, _) in itertools.pairwise(found))
    assert all(0 < used <= 100 for _, used in found)
    assert history(uri, run, "system/disk_available_megabytes")
    assert history(uri, run, "system/cpu_utilization_percentage")
