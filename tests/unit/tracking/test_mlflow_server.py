"""A run reports to a real server that goes and comes back; and what MLflow's pages then show of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow_server
import pytest
from journal_events import step
from mlflow_server import history
from ports import reserve

from springtide import config as configs
from springtide.config import Config
from springtide.errors import CommandFailed, ConfigError
from springtide.events import Evaluated, Event, Rejected, Saved, Started, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS
from springtide.storage import Folder
from springtide.tracking import mlflow_sink
from springtide.tracking.mlflow_client import check_registry, register_export
from springtide.tracking.mlflow_sink import MlflowSink, TrackedDataset

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The URI of a PostgreSQL database, or nothing: sqlite."""
    programs = mlflow_server.postgres_programs()
    with mlflow_server.postgres(programs) if programs else contextlib.nullcontext("") as uri:
        yield uri


def started(number: int, resumed_from: str = "") -> Started:
    return Started(step=number, world_size=2, num_parameters=1_234_567, resumed_from=resumed_from)


def saved(number: int) -> Saved:
    return Saved(step=number, name=f"step-{number:010d}", size_bytes=1, save_time_s=0.1)


@pytest.mark.processes
@pytest.mark.second_try
@pytest.mark.timeout(1500)  # more than all waits below
@pytest.mark.full
def test_a_run_through_outages_is_whole_on_a_real_server(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run through outages and restarts is whole on a real server."""
    import mlflow  # seconds, the first time; the patience below is for the server

    config = configs.recipes.tiny().override({"run.root": str(tmp_path), "run.id": "run"})
    monkeypatch.setattr(mlflow_sink, "_RETRY_S", 0.2)
    settings = configs.flatten(configs.redact(config))
    [port] = reserve(1)
    uri, run, journal = f"http://127.0.0.1:{port}", Folder(tmp_path / "run"), list[Event]()
    digest, elsewhere = "d" * 64, "s3://me:hunter2@bucket/wiki"
    datasets = [
        TrackedDataset("wiki", digest, elsewhere, "training", {"tokens": 1000, "rows": 10}),
        TrackedDataset("books", "e" * 32, "/data/books", "evaluation", {"tokens": 50, "rows": 5}),
    ]

    def sink(grace_s: float) -> MlflowSink:
        tags = {"mlflow.source.name": "springtide train", "springtide.order": "x"}
        return MlflowSink(settings, run, uri, lambda: list(journal), tags, grace_s, datasets)

    def tell(to: MlflowSink, *events: Event) -> None:
        for event in events:
            journal.append(event)
            to(event)

    begin = time.monotonic()
    with sink(1.0) as away:
        tell(away, started(0), *(step(number) for number in (1, 2, 3)))
        assert time.monotonic() - begin < 30, "telling waits for nobody"
        while "cannot be reached" not in caplog.text:
            assert time.monotonic() - begin < 120
            time.sleep(0.05)  # between looks at what its thread says
        begin = time.monotonic()
    assert time.monotonic() - begin < 30
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # of the questions of this test; the sink tries again
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"MLflow at {uri} cannot be reached",
        f"MLflow at {uri} did not receive everything; the next --resume sends the rest",
    ]
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    with sink(330.0) as live:
        with mlflow_server.server(tmp_path, port, database) as process:
            tell(live, started(3, "step-0000000003"), step(4), saved(4), step(5, math.nan))
            deadline = time.monotonic() + 300  # on busy cores, too
            while not run.exists("mlflow.json") or len(history(uri, run, "train/loss")) < 5:
                assert time.monotonic() < deadline, caplog.text
                time.sleep(0.05)  # until the server has step 5
            mlflow_server.kill(process)
        tell(live, step(6), step(7, math.inf), saved(7), Rejected(step=7, name="step-0000000004", reason="r" * 100_000))
        with mlflow_server.server(tmp_path, port, database):
            tell(live, step(8), Stopped(step=8, status="stopped"))
            live.__exit__(None, None, None)
            # killed at 8, resumed from 7: 8 is trained again
            with sink(90.0) as again:
                named = {"objective/a+b": 1.0, "largest_logit": 2.0}
                told = Evaluated(step=9, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=4)
                tell(
                    again, started(7, "step-0000000007"), step(8, 7.0), dataclasses.replace(step(9), extra=named), told
                )
                tell(again, Stopped(step=9, status="finished"))
            _check_run(uri, run, elsewhere)
            _check_registry(uri, run, settings)
    assert mlflow.active_run() is None


def _check_run(uri: str, run: Folder, elsewhere: str) -> None:
    from mlflow import MlflowClient

    client, note = MlflowClient(uri), run.read_json("mlflow.json")
    experiment = client.get_experiment(note["experiment_id"])
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    [found] = client.search_runs([note["experiment_id"]])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    losses = history(uri, run, "train/loss")
    assert [number for number, _ in losses] == list(range(1, 10))
    assert all(after > before for before, after in itertools.pairwise(number for number, _ in losses))
    assert losses[7] == (8, 1.0), "what was sent once is not sent again"
    assert math.isnan(losses[4][1])
    assert losses[6][1] > 1e300
    tracked = {metric.tracked for metric in STEP_METRICS.values()} - {"train/loss_scale"}  # told in fp16 only
    tracked |= {EVAL_METRICS[name].tracked for name in ("heldout_loss", "heldout_bits_per_byte")}
    tracked |= {"train/largest_logit", "train/objective/a_b"}
    assert {name for name in found.data.metrics if not name.startswith("system/")} == tracked
    measured = history(uri, run, "system/system_memory_usage_percentage")
    assert all(after > before for (before, _), (after, _) in itertools.pairwise(measured))
    tags = found.data.tags
    assert tags["mlflow.source.name"] == "springtide train"
    assert (
        "**1,234,567 parameters** on 46,080 tokens, with 1 to 2 workers; 2 at the first" in tags["mlflow.note.content"]
    )
    assert f"`springtide report {run.url}`" in tags["mlflow.note.content"]
    assert tags["springtide.newest_checkpoint"] == f"{run.url}/checkpoints/step-0000000007"
    assert tags["springtide.rejected.step-0000000004"] == "r" * 2000
    assert found.data.params["optim.peak_lr"]
    inputs = {one.dataset.name: one for one in found.inputs.dataset_inputs}
    assert {name: [tag.value for tag in one.tags] for name, one in inputs.items()} == {
        "wiki": ["training"],
        "books": ["evaluation"],
    }
    assert inputs["wiki"].dataset.digest == "d" * 36
    assert inputs["wiki"].dataset.source == '{{"uri": "{}"}}'.format(elsewhere.replace("hunter2", "***"))
    assert inputs["wiki"].dataset.profile == '{"tokens": 1000, "rows": 10}'


def _check_registry(uri: str, run: Folder, settings: dict[str, object]) -> None:
    from mlflow import MlflowClient
    from mlflow.models import Model

    check_registry(uri, "tiny model")
    facts, export = (
        {"checkpoint": "step-0000000007", "architecture": "LlamaForCausalLM"},
        "s3://me:hunter2@bucket/export",
    )
    versions = [register_export(uri, "tiny model", run, export, settings, facts) for _ in range(2)]
    assert versions == ["1", "2"]
    client = MlflowClient(uri)
    found = client.get_model_version("tiny model", "2")
    assert found.run_id == run.read_json("mlflow.json")["run_id"]
    assert found.tags["springtide.checkpoint"] == "step-0000000007"
    assert found.tags["springtide.export"] == "s3://me:***@bucket/export"
    model = client.get_logged_model(found.source.removeprefix("models:/"))
    assert (model.source_run_id, model.status) == (found.run_id, "READY")
    folder = Path(model.artifact_location.replace("mlflow-artifacts:", ""))
    held = {path.name: path.stat().st_size for path in _artifacts(run, folder)}
    assert held.keys() == {"MLmodel", "export.json"}
    assert sum(held.values()) < 4096, "the weights stay where they are"
    [file] = [path for path in _artifacts(run, folder) if path.name == "MLmodel"]
    signature = Model.load(str(file)).signature
    assert [one.name for one in signature.inputs.inputs] == ["input_ids"]
    assert [one.name for one in signature.outputs.inputs] == ["logits"]
    with pytest.raises(ConfigError, match=r"register = 'a/b': .*200 letters"):
        check_registry(uri, "a/b")


def _artifacts(run: Folder, folder: Path) -> list[Path]:
    return sorted((Path(run.path).parent / "artifacts" / str(folder).lstrip("/")).iterdir())


def test_a_registry_that_cannot_be_reached_is_refused_before_the_export() -> None:
    with pytest.raises(ConfigError, match=r"register = 'm': .*http://127\.0\.0\.1:9 "):
        check_registry("http://127.0.0.1:9", "m")
    with pytest.raises(ConfigError, match=r"register = 'm': .*off"):
        check_registry("off", "m")
    config = Config().override({"run.root": "runs"})
    with pytest.raises(CommandFailed, match=r"register .*exports/m "):
        register_export("http://127.0.0.1:9", "m", Folder("memory://r"), "exports/m", configs.flatten(config), {})
