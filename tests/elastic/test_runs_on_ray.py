"""Whole runs on a real Ray cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.data._internal.cluster_autoscaler import DefaultAutoscalingCoordinator

import springtide as st
from springtide import config as configs
from springtide.cli.main import main
from springtide.config import Config
from springtide.elastic import GroupRequest
from springtide.errors import CheckpointError, ConfigError, CorruptShard, RunExists, TrainingFailed
from springtide.events import Decided, Evaluated, Event, Started, StepDone, Stopped
from springtide.ray.cluster.local import kill_worker
from springtide.ray.cluster.nodes import leftovers
from springtide.ray.data import feed as feed_module
from springtide.ray.train.mailbox import EventSender, open_mailbox
from springtide.ray.train.ray_adapter import run_as_actor
from springtide.ray.train.worker_lender import WorkerLender
from springtide.shards import HELDOUT, TRAIN, load_manifest
from springtide.storage import Folder
from springtide.stream import RankReader, open_data
from springtide.tracking.mlflow_client import default_uri

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="session")
def uninterrupted(ray_cluster: str, datasets: Path, tmp_path_factory: pytest.TempPathFactory) -> st.Run:
    """A whole run of the tiny recipe on two workers, from text to report."""
    root = tmp_path_factory.mktemp("uninterrupted")
    changes = {"shards.root": str(datasets), "run.root": str(root), "run.id": "whole", "track.progress": False}
    changes |= {"elastic.min_workers": 2, "train.eval_every": 20, "train.eval_async": True}
    return st.train(configs.recipes.tiny().override(changes))


def named(config: Config, name: str, workers: int, **changes: Any) -> Config:
    fixed = {"run.id": name, "elastic.min_workers": workers, "elastic.max_workers": workers}
    return config.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def test_a_driver_that_fails_takes_its_run_along(tiny: Config, ray_cluster: str) -> None:
    """As one whose listener fails, or a second Ctrl-C. Its server on each node waits a minute for whoever resumes."""

    def fail(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5:
            raise RuntimeError("a listener's own mistake")

    before = Counter(leftovers()) + Counter({"SnapshotServer": 2})
    with pytest.raises(RuntimeError, match="a listener's own mistake"):
        st.train(named(tiny, "fails", 2), listen=fail)
    deadline = time.monotonic() + 30
    while (left := Counter(leftovers()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)  # actors end when Ray gets to it
    assert not left
    assert not [thread for thread in threading.enumerate() if thread.name == "springtide-fit"]


def test_a_thread_that_acts_for_an_actor_is_in_it_for_ray_and_others_are_not(ray_cluster: str) -> None:
    """Where Ray changes what ``ray/train/trainer.py`` relies on, this fails."""
    mailbox, elsewhere = open_mailbox("acting"), list[str | None]()
    with run_as_actor(mailbox.actor):
        assert ray.get_runtime_context().get_actor_id() == mailbox.actor._actor_id.hex()
        assert ray.get_runtime_context().current_actor == mailbox.actor
        other = threading.Thread(target=lambda: elsewhere.append(ray.get_runtime_context().get_actor_id()))
        other.start()
        other.join()
    assert elsewhere == [None]
    assert ray.get_runtime_context().get_actor_id() is None
    ray.kill(mailbox.actor)


@pytest.mark.full
def test_a_run_that_waits_says_what_for_and_until_when(ray_cluster: str, datasets: Path, tmp_path: Path) -> None:
    changes = {"shards.root": str(datasets), "run.root": str(tmp_path), "track.progress": False}
    config = named(configs.recipes.tiny().override(changes), "waits", 9)
    heard: list[Event] = []
    with pytest.raises(TrainingFailed, match=r"waited for 1 s, as elastic\.wait says; waiting for capacity: room for"):
        st.train(config.override({"elastic.wait": 1.0}), listen=heard.append)
    assert any(isinstance(event, Decided) and "elastic.min_workers is 9" in event.reason for event in heard)

    def interrupt(event: Event) -> None:
        if isinstance(event, Decided):
            os.kill(os.getpid(), signal.SIGINT)

    run = st.train(config, resume=True, listen=interrupt)
    [*_, last] = run.events
    assert isinstance(last, Stopped)
    assert (last.status, last.step) == ("stopped", 0)
    assert "asked to, while no group trained" in last.reason


def assert_same(found: list[StepDone], expected: list[StepDone], tolerance: float) -> None:
    assert [(step.step, step.digest) for step in found] == [(step.step, step.digest) for step in expected]
    worst = max(abs(one.loss - other.loss) for one, other in zip(found, expected, strict=True))
    assert worst < tolerance


def test_a_run_goes_from_text_to_report(uninterrupted: st.Run) -> None:
    run = uninterrupted
    assert [step.step for step in run.steps] == list(range(1, 61))
    before, *between, after = run.evaluations
    assert [(one.step, one.asynchronous) for one in run.evaluations] == [
        (0, False),
        (20, True),
        (40, True),
        (60, False),
    ]
    assert before.heldout_loss > between[0].heldout_loss > between[1].heldout_loss > after.heldout_loss
    assert after.heldout_bits_per_byte < 0.65 * before.heldout_bits_per_byte
    assert run.checkpoints == ["step-0000000020", "step-0000000040", "step-0000000060"]
    assert run.sample.startswith("def ")
    assert "held-out bits per byte" in Path(run.report).read_text()
    assert run.metrics.loc[60, "tokens"] == 60 * 12 * 64
    assert configs.load_config(Path(run.report).parent / "config.yaml") == run.config
    found = run.verify()
    assert found.ok
    assert found.steps_checked == 60
    assert found.world_sizes == (2,)


def test_mlflow_has_one_run_with_every_step_and_its_links(uninterrupted: st.Run) -> None:
    from mlflow import MlflowClient

    notes = uninterrupted.folder.read_json("mlflow.json")
    client = MlflowClient(default_uri(Folder(uninterrupted.config.run.root)))
    found = client.search_runs([notes["experiment_id"]])
    assert [run.info.run_id for run in found] == [notes["run_id"]]
    assert found[0].info.status == "FINISHED"
    history = client.get_metric_history(notes["run_id"], "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(one.step, one.loss) for one in uninterrupted.steps]
    assert found[0].data.params["optim.peak_lr"] == str(uninterrupted.config.optim.peak_lr)
    assert found[0].data.tags["springtide.dataset"] == uninterrupted.config.shards.dataset


def test_verify_finds_a_single_wrong_sample(uninterrupted: st.Run, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted.folder.path, tmp_path / "run")
    journal = tmp_path / "run" / "journal" / "0001-0000.jsonl"
    lines = journal.read_text().splitlines()
    place = next(index for index, line in enumerate(lines) if '"step": 33,' in line and '"kind": "step"' in line)
    record = json.loads(lines[place])
    record["digest"] = f"{int(record['digest'], 16) ^ 1:016x}"
    lines[place] = json.dumps(record)
    journal.write_text("\n".join(lines) + "\n")
    found = st.open_run(str(tmp_path / "run")).verify()
    assert not found.ok
    assert [mismatch.step for mismatch in found.mismatches] == [33]
    del lines[place]
    journal.write_text("\n".join(lines) + "\n")
    found = st.open_run(str(tmp_path / "run")).verify()
    assert found.ok
    assert (found.steps_proven_by_chain, found.steps_proven_by_chain_alone, found.checkpoints_checked) == (60, 1, 3)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert st.open_run(str(tmp_path / "run")).verify().missing == (33,)


@pytest.mark.full
def test_torchrun_without_ray_gives_the_same_losses(uninterrupted: st.Run, tiny: Config, tmp_path: Path) -> None:
    config = named(tiny, "torchrun", 2, train__eval_every=20)
    (tmp_path / "config.yaml").write_text(configs.dump(config))
    # a ray that cannot be imported stands first on the path
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('ray was imported')")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "springtide.training", "--config", str(tmp_path / "config.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = st.open_run(f"{config.run.root}/torchrun")
    assert_same(run.steps, uninterrupted.steps, 1e-5)
    assert not any(one.asynchronous for one in run.evaluations)
    here, there = run.evaluations, uninterrupted.evaluations
    assert [(one.step, one.rows) for one in here] == [(one.step, one.rows) for one in there]
    assert [one.heldout_loss for one in here] == pytest.approx([one.heldout_loss for one in there], abs=1e-5)


def test_a_checkpoint_is_evaluated_by_whoever_asks(uninterrupted: st.Run, capsys: pytest.CaptureFixture[str]) -> None:
    [seen] = [one for one in uninterrupted.evaluations if one.step == 40]
    assert uninterrupted.evaluate(40, seen.tokens).heldout_loss == seen.heldout_loss
    assert main(["model", "evaluate", uninterrupted.folder.path, "--json"]) == 0
    out = capsys.readouterr().out  # Ray prints there, too, in a process that is connected
    [found] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert found["step"] == 60
    assert found["rows"] == load_manifest(Folder(uninterrupted.config.shards.dataset)).splits[HELDOUT].rows
    assert main(["model", "evaluate", uninterrupted.folder.path, "--step", "41"]) == 2
    assert "has no checkpoint that counts" in capsys.readouterr().err


def test_ctrl_c_saves_and_stops_and_the_run_goes_on_at_any_size(uninterrupted: st.Run, tiny: Config) -> None:
    """2 -> 3 -> 1 workers between restarts; Ctrl-C comes at any moment, not at a step that suits: a group stops as many steps
    later as it has done when it hears of it."""
    seen: list[Event] = []

    def listener(stops: bool) -> Any:
        steps_left = [3]

        def listen(event: Event) -> None:
            seen.append(event)
            steps_left[0] -= isinstance(event, StepDone)
            if stops and isinstance(event, StepDone) and steps_left[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)

        return listen

    for workers, stops in ((2, True), (3, True), (1, False)):
        run = st.train(named(tiny, "resized", workers), resume=workers != 2, listen=listener(stops))
        end = seen[-1] if stops else [event for event in seen if isinstance(event, Stopped)][-1]
        assert isinstance(end, Stopped)
        assert end.status == ("stopped" if stops else "finished")
    starts = [event for event in seen if isinstance(event, Started)]
    assert [start.world_size for start in starts] == [2, 3, 1]
    assert 0 == starts[0].step < starts[1].step < starts[2].step < 60
    assert_same(run.steps, uninterrupted.steps, 1e-4)
    found = run.verify()
    assert found.ok
    assert found.world_sizes == (1, 2, 3)
    assert found.steps_trained_again == 0


@pytest.mark.full
def test_a_second_driver_says_who_trains_and_writes_nothing(tiny: Config, ray_cluster: str, tmp_path: Path) -> None:
    """In a process of its own, while the first one trains. The listener holds up the journal, and nothing else is written."""
    changes = {"train__total": "1B", "train__eval_tokens": 0, "train__sample_tokens": 0, "checkpoint__every_steps": 0}
    config = named(tiny, "driven", 1, **changes, stream__max_epochs=1e6)
    (tmp_path / "config.yaml").write_text(configs.dump(config))
    command = [
        sys.executable,
        "-m",
        "springtide.cli.main",
        "train",
        "--config",
        str(tmp_path / "config.yaml"),
        "--resume",
    ]
    refused: list[subprocess.CompletedProcess[str]] = []

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path(config.run.root).rglob("*") if path.is_file()}

    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and not refused:
            before = files()
            refused.append(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False))
            assert files() == before
            os.kill(os.getpid(), signal.SIGINT)

    run = st.train(config, listen=listen)
    [second] = refused
    assert second.returncode == 3, second.stderr
    assert re.search(rf"driven is held by lease \d+, begun .* by process {os.getpid()} on ", second.stderr)
    assert run.status == "stopped"
    assert run.verify().ok


@pytest.mark.full
def test_an_interrupt_is_no_failure_and_after_the_last_step_it_undoes_nothing(tiny: Config, ray_cluster: str) -> None:
    """KeyboardInterrupt, as the second Ctrl-C raises it in the driver: in the middle of a run, and when it has finished."""
    config = named(tiny, "interrupted", 1, train__total=12 * 64 * 6, optim__warmup=0, train__eval_tokens=0)

    def interrupt_at(what: type[Event], step: int) -> Any:
        def listen(event: Event) -> None:
            if isinstance(event, what) and event.step == step:
                raise KeyboardInterrupt

        return listen

    with pytest.raises(KeyboardInterrupt):
        st.train(config, resume="auto", listen=interrupt_at(StepDone, 3))  # there is none: it begins
    run = st.open_run(f"{config.run.root}/interrupted")
    assert isinstance(end := run.events[-1], Stopped)
    assert (end.status, end.step) == ("stopped", 3)
    with pytest.raises(KeyboardInterrupt):
        st.train(config, resume="auto", listen=interrupt_at(Stopped, 6))
    assert run.finished
    before = run.events
    assert st.train(config, resume="auto").events == before
    assert [(event.step, event.status) for event in before if isinstance(event, Stopped)] == [
        (3, "stopped"),
        (6, "finished"),
    ]


@pytest.mark.full
def test_a_mixture_whose_weights_change_is_exact_through_resizes_and_a_kill(
    tiny: Config, poems: str, ray_cluster: str
) -> None:
    """2 -> 3 workers, a worker killed and its group started again, -> 1; weights change at 20 and 50, announced on the way.
    Until a group hears that it is to stop it trains on, so it is asked long before the next change."""
    tables: list[dict[str, Any]] = [{"shares": {"code": 3, "poems": 1}}]
    corpora = {"code": tiny.shards.dataset, "poems": poems}
    starts: list[Started] = []

    def listener(group_to_kill: int, group_to_stop: int, stop_at: int) -> Any:
        done: set[str] = set()

        def listen(event: Event) -> None:
            if isinstance(event, Started):
                starts.append(event)
            if not isinstance(event, StepDone):
                return
            if len(starts) == group_to_kill and event.step > starts[-1].step + 1 and "kill" not in done:
                done.add("kill")
                kill_worker()
            if len(starts) == group_to_stop and event.step >= stop_at and "stop" not in done:
                done.add("stop")
                os.kill(os.getpid(), signal.SIGINT)

        return listen

    for workers, new_table, what in (
        (2, None, (0, 1, 3)),
        (3, {"from_step": 20, "shares": {"code": 1, "poems": 3}}, (2, 3, 25)),
        (1, {"from_tokens": 50 * tiny.tokens_per_step, "shares": {"code": 1}}, (0, 0, 0)),
    ):
        tables += [new_table] if new_table else []
        config = named(tiny, "mixed", workers, stream__mixture=corpora, stream__weights=tables)
        run = st.train(config, resume=workers != 2, listen=listener(*what))
    assert [start.world_size for start in starts] == [2, 3, 3, 1]
    found = run.verify()
    assert found.ok
    assert (found.steps_checked, found.world_sizes) == (60, (1, 2, 3))
    order = open_data(config.data).order
    for steps, share in ((range(20), 1 / 4), (range(20, 50), 3 / 4), (range(50, 60), 0.0)):
        for step in steps:
            assert abs(int(order.corpora(step).sum()) - share * order.global_batch) < 1
    assert run.evaluations[-1].corpora.keys() == {"code", "poems"}
    # what is done may not be changed after the fact
    with pytest.raises(CheckpointError, match="other weights or skips of steps that are done"):
        st.train(named(config, "mixed", 1, stream__weights=tables[:1]), resume=True)


@pytest.mark.full
def test_a_shard_that_rots_stops_the_run_at_once_and_is_named(tiny: Config, ray_cluster: str, tmp_path: Path) -> None:
    shutil.copytree(tiny.shards.dataset, tmp_path / "rotten")
    shard = load_manifest(Folder(tmp_path / "rotten")).splits[TRAIN].shards[0]
    file = tmp_path / "rotten" / shard.name
    data = bytearray(file.read_bytes())
    data[2000::500] = bytes(len(data[2000::500]))
    file.write_bytes(data)
    starts: list[Event] = []
    config = named(tiny, "rotten", 2, shards__dataset=str(tmp_path / "rotten"))
    with pytest.raises(CorruptShard, match=rf"(?s){shard.name}.*digest expected {shard.digest}, found [0-9a-f]+"):
        st.train(config, listen=lambda event: starts.append(event) if isinstance(event, Started) else None)
    assert len(starts) == 1  # a fatal error is not tried again
    end = st.open_run(f"{config.run.root}/rotten").events[-1]
    assert isinstance(end, Stopped)
    assert end.status == "failed"


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full), 17])
def test_the_feed_gives_each_rank_its_batches_in_order(
    tiny: Config, ray_cluster: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_READS_PER_PIPELINE", 3)  # several pipelines, several reads in each
    whole = open_data(tiny.data).order
    all_of_a_step = [int(sample) for step in (first + 3, first + 24) for sample in whole.rank_batch(step, 1, 3)]
    data = open_data(tiny.override({"stream.skip_samples": [{"samples": all_of_a_step}]}).data)
    order, reader = data.order, RankReader(data, 1, 3)
    plan = reader.plan(first, first + 25, 4 * 3 * 2 * (data.sequence_length + 1))
    assert len(plan) > 6
    monkeypatch.setattr(DefaultAutoscalingCoordinator, "__init__", None)  # a pipeline that registers fails
    batches = list(feed_module.feed(reader, plan, tiny.feed))
    assert [batch.step for batch in batches] == list(range(first, first + 25))
    assert [batch.step for batch in batches if not len(batch.sample_ids)] == [first + 3, first + 24]
    for batch, direct in zip(batches, (batch for read in plan for batch in reader.batches(read)), strict=True):
        assert np.array_equal(batch.sample_ids, order.rank_batch(batch.step, 1, 3))
        assert np.array_equal(batch.tokens, direct.tokens)


def test_a_refused_run_and_a_dry_run_leave_nothing(tiny: Config, ray_cluster: str) -> None:
    large = {"model.dim": 2**17, "model.ffn_dim": 2**19, "model.num_layers": 2, "train.micro_batch": "auto"}
    with pytest.raises(ConfigError, match=r"2 layers of 131072.* more than the .* that each has"):
        st.train(tiny.override(large))
    found = st.resolve(tiny.override({"train.micro_batch": "auto", "run.id": "dry"}))
    rows = found.config.train.micro_batch
    assert isinstance(rows, int)
    assert any(remark.startswith(f"train.micro_batch = {rows} fits") for remark in found.remarks)
    assert (found.starts_from, found.finished, found.run.id) == ("", False, "dry")
    assert not Path(tiny.run.root).exists()


def test_the_line_between_workers_and_driver_loses_nothing(ray_cluster: str) -> None:
    mailbox = open_mailbox(None)
    line = EventSender(mailbox)

    def heard() -> GroupRequest | None:
        assert line._request.has_come(30.0)
        return line.interrupt()

    assert line.interrupt() is None
    sent = [Evaluated(step=step, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1) for step in range(5)]
    line(sent[0])
    mailbox.ask(GroupRequest.SAVE).get()
    for event in sent[1:]:
        line(event)
    assert heard() is GroupRequest.SAVE
    assert line.interrupt() is None  # asked once
    mailbox.ask(GroupRequest.STOP).get()
    line.flush()
    line(sent[0])
    assert heard() is GroupRequest.STOP
    assert line.interrupt() is GroupRequest.STOP
    assert mailbox.take(1.0).get() == [*sent, sent[0]]
    assert mailbox.take(0.01).get() == []
    ray.kill(mailbox.actor)


def test_one_driver_trains_a_run_and_what_comes_late_for_it_does_not_reach_the_next(
    tiny: Config, ray_cluster: str
) -> None:
    workers, config = WorkerLender(), named(tiny, "one", 1)
    first = workers.open_mailbox(config)
    with pytest.raises(RunExists, match="another driver"):
        WorkerLender().open_mailbox(config)
    first.ask(GroupRequest.STOP).get()
    assert first.request(None).get() is GroupRequest.STOP
    second = workers.open_mailbox(config)
    assert second.actor == first.actor
    late = Evaluated(step=1, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=1)
    assert [one.get() for one in (first.post([late]), first.ask(GroupRequest.STOP), first.progress())] == [None] * 3
    first.limit_micro_batch(1)
    progress = second.progress().get()
    assert progress is not None
    assert not progress.stop
    assert second.take(0.01).get() == []
    assert second.largest_micro_batch().get() is None
    workers.end()
    other = WorkerLender()
    deadline = time.monotonic() + 30
    while True:
        try:
            other.open_mailbox(config)
            break
        except RunExists:  # Ray has not noticed that it was ended
            assert time.monotonic() < deadline
            time.sleep(0.1)  # between tries
    other.end()


def test_a_job_is_submitted_trained_and_verified(tiny: Config, one_node: str, tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    job = tmp_path / "job"
    shutil.copytree(repository / "jobs", job / "jobs")
    settings = {
        "run.id": "submitted",
        "run.root": tiny.run.root,
        "shards.dataset": tiny.shards.dataset,
        "track.mlflow-uri": "off",
        "train.total": str(12 * 64 * 15),
        "elastic.min-workers": "2",
    }
    options = [text for name, value in settings.items() for text in (f"--{name}", value)]
    command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", one_node]
    command += ["--working-dir", str(job), "--", sys.executable, "jobs/train.py", "--recipe", "tiny", *options]
    deadline = time.monotonic() + 120
    while True:  # Ray's agent on a busy machine: what its error says to do
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if "please try again later" not in done.stdout + done.stderr or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    run = st.open_run(f"{tiny.run.root}/submitted")
    assert len(run.steps) == 15
    assert run.verify().ok
