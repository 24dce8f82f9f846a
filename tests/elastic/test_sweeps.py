"""Sweeps on real clusters: whose nodes go, whose driver is killed, whose trials are no good."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.tune import with_parameters
from ray.tune.trainable.trainable import TRIAL_INFO
from swept import STEPS, config_of, driver, population, table, trained

import springtide as st
from springtide import config as configs
from springtide.api.sweep import sweep
from springtide.checkpoint import leases
from springtide.checkpoint.format import committed
from springtide.checkpoint.format import name_of as name_at
from springtide.errors import ConfigError, RunExists
from springtide.events import Evaluated, Event, Started, StepDone
from springtide.ray.tune.messages import HeldSweep, TrialJob
from springtide.ray.tune.trial import Trial
from springtide.ray.tune.tuner import BudgetStopper, ProgressCallback
from springtide.ray.tune.worker_pool import WorkerPoolClient, open_worker_pool
from springtide.storage import Folder
from springtide.tracking.journal import read_journal
from springtide.tracking.mlflow_client import default_uri
from springtide.tune import SweepFolder, name_of, read

pytestmark = pytest.mark.cluster
SCRIPT = str(Path(__file__).parents[1] / "programs" / "swept.py")
TRIALS = 3


@pytest.mark.full
def test_trials_survive_lost_nodes_and_a_killed_driver_and_are_the_runs_they_would_have_been_alone() -> None:
    """Two trials on three nodes, of which one goes; `make long SUBJECT=sweeps` has sixteen and six."""
    command = [sys.executable, SCRIPT, "2", "1", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["problems"] == [], done.stderr[-3000:]


def test_what_is_no_good_is_stopped_what_fails_is_marked_and_the_best_is_a_config(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{tmp_path}/of-the-environment.db"  # a trial's process has another environment
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    base = config_of(str(tmp_path)).override({"optim.max_left_out": 0, "track.mlflow_uri": ""})
    rates = (0.01, 1e-7, 1e30)
    space = {**table(TRIALS), "SPACE": {"optim.peak_lr": ("choice", *rates)}}
    space["OBJECTIVE"] |= {"secondary": {"metric": "step_worker_s", "mode": "min"}}
    space["BUDGET"] |= {"finalists": 1, "seeds": 2}
    said: list[str] = []
    verdict = sweep(base, space, name="asha", search="grid", concurrent=1, say=said.append)
    by_rate = {one.point["optim.peak_lr"]: one for one in verdict.outcomes if one.repeats < 0}
    [again] = [one for one in verdict.outcomes if one.repeats >= 0]
    assert [by_rate[rate].status for rate in rates] == ["finished", "stopped", "failed"]
    assert [len(by_rate[rate].rungs) for rate in rates[:2]] == [3, 1]
    assert "skipped, the last one" in by_rate[1e30].reason
    assert verdict.best is by_rate[0.01]
    assert verdict.front == (verdict.best,)
    assert (again.status, again.repeats, again.point["model.init_seed"]) == ("finished", verdict.best.number, 1)
    assert [final.values for final in verdict.finals] == [(verdict.best.value, again.value)]
    assert again.value != verdict.best.value
    assert any("FAILED" in text for text in said)
    ended = tmp_path / "runs" / "asha" / "ended"
    assert sorted(file.stem for file in ended.iterdir()) == sorted(by_rate[rate].name for rate in rates[1:])
    assert again.name in (tmp_path / "runs" / "asha" / "sweep.html").read_text()
    best = configs.load_config(tmp_path / "runs" / "asha" / "best.yaml")
    assert (best.optim.peak_lr, best.run.root, best.run.id) == (0.01, str(tmp_path / "runs"), "")

    from mlflow import MlflowClient

    notes = json.loads((tmp_path / "runs" / "asha" / "mlflow.json").read_text())
    runs = MlflowClient(elsewhere).search_runs([notes["experiment_id"]])
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    telling = [str(path) for path in files if b"of-the-environment" in path.read_bytes()]
    assert not telling, "what the environment says is written nowhere"
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == notes["run_id"]]
    assert len(runs) == len(children) + 1 == TRIALS + 1 + 1
    [parent] = [run for run in runs if run.info.run_id == notes["run_id"]]
    assert parent.data.tags["springtide.best.trial"] == verdict.best.name

    with pytest.raises(RunExists, match="--resume"):
        sweep(base, space, name="asha", search="grid")
    with pytest.raises(ConfigError, match="was started with another space"):
        sweep(base, space, name="asha", search="random", resume=True)
    again = sweep(base, space, name="asha", search="grid", concurrent=1, resume=True, say=said.append)
    assert [(one.status, one.rungs) for one in again.outcomes] == [(one.status, one.rungs) for one in verdict.outcomes]


def sizes(runs: list[st.Run]) -> set[int]:
    """World sizes that they trained at."""
    return {event.world_size for run in runs for event in run.events if isinstance(event, Started)}


def begun_and_killed(root: Path) -> None:
    """Begin the sweep of a population, and kill its driver after the first rung."""
    process, folder = driver("members", str(root)), root / "runs" / "members"
    try:
        deadline = time.monotonic() + 300
        while trained(folder) < 4 * STEPS // 3 + 5:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.3)  # between looks at the journals
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.full), pytest.param(True, marks=pytest.mark.full)]
)
def test_the_worst_of_a_population_goes_on_from_the_state_of_the_best(
    ray_cluster: str, tmp_path: Path, killed: bool
) -> None:
    """Whose states are sharded over whatever number of workers. Those that were killed had two each, and go on with one."""
    base, space, options = population(str(tmp_path), 1, 1 if killed else 3)
    folder = tmp_path / "runs" / "members"
    if killed:
        begun_and_killed(tmp_path)
    said: list[str] = []
    verdict = sweep(base, space, **options, resume=killed, say=said.append)
    assert [one.status for one in verdict.outcomes] == ["finished"] * 4, said
    turned = [one for one in verdict.outcomes if one.lineage]
    assert turned, said
    trials = folder / "trials"
    begun = [st.open_run(str(trials / one.name)) for one in verdict.outcomes]
    best = min(begun, key=lambda run: next(found.heldout_loss for found in run.evaluations if found.step == STEPS // 3))
    first = min((one.lineage[0] for one in turned), key=lambda state: state[-10:])
    assert first == f"{best.folder.url}/checkpoints/{name_at(STEPS // 3)}", "all four were waited for, three at a time"
    taken = []
    for one in turned:
        run = st.open_run(str(trials / f"{one.name}-{len(one.lineage)}"))
        donor, name = run.config.train.start_from.rsplit("/checkpoints/", 1)
        step, other = int(name.removeprefix("step-")), st.open_run(donor)
        assert run.config.train.start_from == one.lineage[-1]
        assert run.steps[0].step == step + 1
        [there] = [found.heldout_loss for found in other.evaluations if found.step == step]
        assert abs(run.steps[0].loss - there) < 0.3, "its loss goes on from that of the state it took over"
        assert run.verify().ok
        taken += [run, other]
    assert not killed or sizes(taken) == {1, 2}, "states were taken over at other world sizes"
    everyone = [st.open_run(str(file.parent)) for file in trials.glob("*/config.yaml")]
    assert len(sizes(everyone)) > 1, "three at a time on four workers are not all of one size"

    from mlflow import MlflowClient

    notes = json.loads((folder / "mlflow.json").read_text())
    runs = MlflowClient(default_uri(Folder(tmp_path / "runs"))).search_runs([notes["experiment_id"]])
    children = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == notes["run_id"]}
    assert sorted(children) == [one.name for one in verdict.outcomes], "one run a trial for life"
    for one in turned:
        assert children[one.name].data.tags["springtide.lineage"].split(" <- ")[0] == one.lineage[-1]
        assert "springtide.now.optim.peak_lr" in children[one.name].data.tags


@pytest.mark.full
def test_the_last_result_of_a_trial_is_told_when_its_run_has_ended(ray_cluster: str, tmp_path: Path) -> None:
    """Told at once, Tune would stop a run that has lost a worker since, and has steps to train again."""
    base, ended = config_of(str(tmp_path)), tmp_path / "ended"

    def train(config: configs.Config, listen: Callable[[Event], None], **named: object) -> None:
        for step in (STEPS // 3, STEPS):
            listen(Evaluated(step=step, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1))
        time.sleep(1.0)  # what a last save takes, or another group
        ended.touch()

    with open_worker_pool({"CPU": 1.0}) as pool:
        found = read(table(1), base)
        held = HeldSweep(SweepFolder(Folder(tmp_path)), term=0)
        job = TrialJob(base, found, held, pool, train, lambda folder: None)
        about = {TRIAL_INFO: SimpleNamespace(trial_name=name_of(0))}
        trial = with_parameters(Trial, job=job)({"trial": {"number": 0, "point": {}}, **about})
        first, second = trial.step(), trial.step()
        assert [(one["done"], one["step"]) for one in (first, second)] == [(False, STEPS // 3), (True, STEPS)]
        assert ended.exists()
        trial.cleanup()


_HOLDER = (
    "import sys; from springtide.checkpoint import leases; from springtide.storage import Folder; "
    "leases.claim(Folder(sys.argv[1]), 'another driver', trains=False); print('claimed', flush=True); sys.stdin.read()"
)


def test_a_second_driver_of_a_sweep_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    base, folder = config_of(str(tmp_path)), tmp_path / "runs" / "held"
    folder.mkdir(parents=True)
    table_of = read(table(TRIALS), base)
    notes = {"search": "random", "seed": 0, "space": [dataclasses.asdict(one) for one in table_of.space]}
    (folder / "sweep.json").write_text(json.dumps(notes))
    command = [sys.executable, "-c", _HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(RunExists, match=rf"is held by lease 1, begun .* by process {holder.pid} on "):
            sweep(base, table(TRIALS), name="held", resume=True)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        holder.communicate("")


@pytest.mark.full
def test_a_driver_whose_sweep_was_taken_over_notes_nothing_and_ends(ray_cluster: str, tmp_path: Path) -> None:
    """As when it was cut off from the store, and another host went on with the sweep."""
    base, sweep_folder, said = config_of(str(tmp_path)), Folder(tmp_path), list[str]()
    held = HeldSweep(SweepFolder(sweep_folder), leases.claim(sweep_folder, "first", trains=False).term)
    found = read(table(1), base)

    def train(config: configs.Config, **named: object) -> None:
        raise RunExists("the run is held by lease 2")

    with open_worker_pool({"CPU": 1.0}) as pool:
        job = TrialJob(base, found, held, pool, train, lambda folder: None)
        monkey = pytest.MonkeyPatch()
        monkey.setattr("springtide.ray.tune.trial_runner._FREE_S", 0.0)
        about = {TRIAL_INFO: SimpleNamespace(trial_name=name_of(0))}
        trial = with_parameters(Trial, job=job)({"trial": {"number": 0, "point": {}}, **about})
        assert "held by lease 2" in trial.step()["held"], "its run is another's: it does not fail for that"
        leases.claim(sweep_folder, "second", trains=False)
        trial.save_checkpoint("")  # the next step begins the run again
        last = trial.step()
        assert "may not write any more" in last["held"]
        trial.cleanup()
        monkey.undo()
        spent = BudgetStopper(found.budget, pool, (), threading.Event())
        watch = ProgressCallback(found, SimpleNamespace(live=0), spent, said.append, spent.unless_lost(held.end_trial))  # type: ignore[arg-type]
        of = SimpleNamespace(trial_id="0", custom_trial_name=name_of(0), last_result=last)
        watch.on_trial_complete(0, [], of)
        assert "skipped, another driver holds it" in said[-1]
        assert not spent.stop_all(), "a trial's run that is held ends the trial alone"
        of.last_result = {found.metric: 1.0, "failed": "for another reason"}
        watch.on_trial_complete(0, [], of)
        assert spent.stop_all(), "who may not write does not go on"
    assert not (tmp_path / "ended").exists()


@pytest.mark.full
def test_nobody_grows_to_what_was_seen_to_scale_badly(ray_cluster: str) -> None:
    elastic = {"elastic.min_workers": 1, "elastic.max_workers": 3}
    with open_worker_pool({"CPU": 1.0}) as pool:
        share, other = WorkerPoolClient(pool), WorkerPoolClient(pool)

        def workers(of: WorkerPoolClient) -> float:
            return sum(each["CPU"] for each in of.mine(10.0).nodes.values())

        share.claim(configs.recipes.tiny().override(elastic))
        assert workers(share) == 3
        share.set_score(0.0, {1: 100.0, 3: 290.0})
        assert workers(share) == 3
        share.set_score(0.0, {1: 100.0, 2: 110.0})
        assert workers(share) == 1
        other.claim(configs.recipes.tiny().override({**elastic, "elastic.min_workers": 2}))
        assert (workers(share), workers(other)) == (1, 2), "it has what it needs all the same"
        assert not share.closed()
    until = time.monotonic() + 120
    while not share.closed():  # Ray ends an actor some time after `kill` returned
        assert time.monotonic() < until, "trials save and end with their sweep"


@pytest.mark.full
def test_a_sweep_ends_where_its_budget_does(ray_cluster: str, tmp_path: Path) -> None:
    base = config_of(str(tmp_path))
    space = table(TRIALS)
    space["BUDGET"]["tokens_per_trial"] *= 3
    space["BUDGET"]["rungs"] *= 3
    space["BUDGET"]["tokens"] = 0.2 * space["BUDGET"]["tokens_per_trial"]
    said: list[str] = []
    verdict = sweep(base, space, name="short", scheduler="none", concurrent=1, say=said.append)
    assert any(text.startswith("the budget is spent, tokens") for text in said)
    assert [one.status for one in verdict.outcomes] == ["stopped"]
    assert verdict.best is not None
    assert space["BUDGET"]["tokens"] <= verdict.tokens < space["BUDGET"]["tokens_per_trial"]


@pytest.mark.full
def test_terminated_as_ray_job_stop_does_it_a_sweep_saves_its_trials_and_ends_with_its_result(
    ray_cluster: str, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "runs" / "swept", 150
    process = driver("drive", str(tmp_path), "2", str(steps))
    try:
        deadline = time.monotonic() + 400
        while trained(folder) < 40:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)  # between looks at the journals
        process.terminate()
        told, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    trials = json.loads(told.splitlines()[-1])["trials"]
    assert all(one["reason"].startswith("interrupted at step ") for one in trials), "all may go on"
    assert (folder / "sweep.html").is_file()
    runs = [st.open_run(str(folder / "trials" / one["name"])) for one in trials]
    saved = [max(committed(run.folder)) for run in runs]
    assert saved == [name_at(run.last_step) for run in runs]
    again = driver("drive", str(tmp_path), "2", str(steps), "resume")
    told, _ = again.communicate(timeout=400)
    assert again.returncode == 0
    for run in runs:
        journal = read_journal(run.folder)
        assert [one.step for one in journal if isinstance(one, StepDone)] == list(range(1, steps + 1)), "none twice"
        assert run.verify().ok
