"""What a lost, an announced and a new node cost: springtide, bare Ray Train elastic, torchrun elastic.

Three nodes on this machine train the same model; one is announced to go and goes, one is killed, one joins. All three clients
run the same training loop with the same checkpoints, every ten steps, so that only who restarts it, and from what, differs:

    springtide   st.train: notices, memory tier, processes that outlive their group
    bare Ray     TorchTrainer(num_workers=(1, 3)) with Ray's own elastic policy, as it comes; nodes as in ours
    torchrun     --nnodes=1:3 --rdzv-backend=c10d, as it comes; a notice is SIGTERM to the agent, as a spot handler would send

A gap is the time between the last step before and the first step after; what training through a notice until the node goes
saves and then loses shows in the steps lost. ``steady`` compares a step with memory tier and policy to one without, on Ray.

    python benchmarks/recovery.py [--only springtide|bare_ray|torchrun] [--quick] [--json] [--rounds 2] [--steady 5]
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))

import claims
import psutil
from ports import reserve

import springtide as st
from springtide import config as configs
from springtide.config import Config
from springtide.events import StepDone
from springtide.run.folder import Run
from springtide.store import Folder
from springtide.track.ledger import Restart, ledger

NODES = 3
PATIENCE_S = 240.0
EVENTS = {"notice": 2, "kill": 1, "grow": 2}
"""What happens, and how many train after it."""
GOALS = {"notice": 15.0, "kill": 10.0, "grow": 1.0}
LOST = {"notice": 0, "kill": 1, "grow": 0}
RAYS_OWN = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2.0"}
"""What springtide sets otherwise."""


class Pace(NamedTuple):
    """How long everything takes."""

    notice_s: float = 15.0
    before: int = 30
    """Steps before the first event."""
    after: int = 20
    """Steps after each."""
    settled: int = 60
    """Steps until nothing that starts beside training takes from it any longer."""
    steady: int = 200
    """Steps."""


SMALL = {"corpus.max_files": 40, "model.num_layers": 2, "model.dim": 64, "model.ffn_dim": 160}
"""For --quick."""
QUICK = Pace(6.0, 8, 8, 10, 40)


class Nodes(Protocol):
    """What can happen to a cluster."""

    def notice(self) -> None:
        """One is told that it will go, and goes ``Pace.notice_s`` later."""

    def grow(self) -> None:
        """One joins."""

    def kill(self) -> None:
        """One goes."""


def play(nodes: Nodes, run: Run, pace: Pace) -> dict[str, float]:
    """Let everything happen, each when training goes on again; gap and steps lost of each, as far as it got."""
    _until(run, NODES, pace.before, time.time())
    began: dict[str, float] = {}
    for event, workers in EVENTS.items():
        begin = time.time()
        getattr(nodes, event)()
        try:
            _until(run, workers, pace.after, begin)
        except TimeoutError as error:
            _say(f"  {event}: {error}")
            break
        began[event] = begin
        _say(f"  {event}: trains on with {workers}")
    return _costs(ledger(run.events).restarts, began)


def _until(run: Run, workers: int, steps: int, since: float) -> None:
    """Until ``workers`` have done ``steps`` since then."""
    deadline = time.time() + PATIENCE_S
    while True:
        done = [one for one in _steps(run) if one.world_size == workers and one.time_s > since]
        if len(done) >= steps:
            return
        if time.time() > deadline:
            raise TimeoutError(f"{workers} workers did not do {steps} steps in {PATIENCE_S:.0f} s")
        time.sleep(0.2)  # between looks


def _steps(run: Run) -> list[StepDone]:
    return [one for one in run.events if isinstance(one, StepDone)] if run.folder.exists("journal") else []


def _costs(restarts: list[Restart], began: dict[str, float]) -> dict[str, float]:
    costs = {}
    ends = [*list(began.values())[1:], time.time()]
    for (event, begin), end in zip(began.items(), ends, strict=False):
        mine = [one for one in restarts if begin < one.time_s <= end]
        costs[f"{event}_gap_s"] = sum(one.gap_s for one in mine)
        costs[f"{event}_steps_lost"] = float(sum(one.steps_lost for one in mine))
    return costs


class _Raylets:
    """Nodes of a LocalCluster."""

    def __init__(self, cluster: Any, notice_s: float) -> None:
        self._cluster, self._notice_s = cluster, notice_s
        self._doomed: dict[str, threading.Timer] = {}

    def notice(self) -> None:
        node = self._cluster.nodes[0]
        self._cluster.drain(node, self._notice_s)
        self._doomed[node] = threading.Timer(self._notice_s, self._cluster.kill, (node,))
        self._doomed[node].start()

    def grow(self) -> None:
        self._cluster.add()

    def kill(self) -> None:
        self._cluster.kill(next(node for node in self._cluster.nodes if node not in self._doomed))

    def end(self) -> None:
        for timer in self._doomed.values():
            timer.join()


class _Agents:
    """Nodes that are torchrun's agents."""

    def __init__(self, config: str, notice_s: float) -> None:
        self._notice_s = notice_s
        endpoint = f"127.0.0.1:{reserve(1)[0]}"
        torchrun = (
            f"-m torch.distributed.run --nnodes=1:{NODES} --nproc-per-node=1 --max-restarts=100 --local-addr=127.0.0.1"
        )
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=recovery"
        self._command = [sys.executable, *torchrun.split(), *rendezvous.split(), "-m", "springtide.training"]
        self._command += ["--config", config]
        self._agents: list[psutil.Popen] = []
        for _ in range(NODES):
            self.grow()
            time.sleep(1)  # the first is to be the one that keeps the rendezvous: it is never lost

    def notice(self) -> None:
        self._agents[-1].send_signal(signal.SIGTERM)
        threading.Timer(self._notice_s, _end, (self._agents.pop(),)).start()

    def grow(self) -> None:
        self._agents.append(psutil.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def kill(self) -> None:
        _end(self._agents.pop())

    def end(self) -> None:
        for agent in self._agents:
            _end(agent)


def _end(agent: psutil.Popen) -> None:
    """With all below it, as when its host goes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    agent.wait()


def springtide(config: Config, pace: Pace) -> dict[str, float]:
    """Ours."""
    return _on_raylets(_cluster(), lambda: st.train(config), _run(config), pace)


def bare_ray(config: Config, pace: Pace) -> dict[str, float]:
    """Ray Train's own elasticity around the loop that torchrun has too."""
    os.environ.update(RAYS_OWN)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def plain(values: dict[str, Any]) -> None:  # in here, so that Ray sends it by value
        from springtide.training.__main__ import train

        here = configs.build(values)
        train(here, Folder(here.run.root) / here.run.id, "cpu", 0)

    cluster = _cluster()
    trainer = TorchTrainer(
        plain,
        train_loop_config=config.model_dump(mode="json"),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, NODES), resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="bare", storage_path=f"{config.run.root}/ray", failure_config=FailureConfig(max_failures=-1)
        ),
    )
    return _on_raylets(cluster, trainer.fit, _run(config), pace)


def torchrun(config: Config, pace: Pace) -> dict[str, float]:
    """torch's own elasticity."""
    resolved = Path(config.run.root, f"{config.run.id}.yaml")
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(configs.dump(config))
    agents = _Agents(str(resolved), pace.notice_s)
    try:
        return play(agents, _run(config), pace)
    finally:
        agents.end()


CLIENTS: dict[str, Callable[[Config, Pace], dict[str, float]]] = {
    "springtide": springtide,
    "bare_ray": bare_ray,
    "torchrun": torchrun,
}


def _cluster() -> Any:
    """Of this process, which tells what it found before the cluster ends: who still trains on it may take the process along."""
    from springtide.on_ray.cluster.local import LocalCluster

    stack = contextlib.ExitStack()
    cluster = stack.enter_context(LocalCluster(NODES))
    multiprocessing.util.Finalize(None, stack.close, exitpriority=0)
    return cluster


def _on_raylets(cluster: Any, train: Callable[[], Any], run: Run, pace: Pace) -> dict[str, float]:
    """What ``play`` finds while ``train`` runs in a thread that is never waited for: its cluster ends under it."""

    def quietly() -> None:
        with contextlib.suppress(BaseException):
            train()

    threading.Thread(target=quietly, daemon=True).start()
    nodes = _Raylets(cluster, pace.notice_s)
    try:
        return play(nodes, run, pace)
    finally:
        nodes.end()


def _run(config: Config) -> Run:
    return Run(Folder(config.run.root) / config.run.id)


def steady(config: Config, machinery: bool, settled: int) -> dict[str, float]:
    """Median seconds of a step on Ray, with all that elasticity needs or with none of it."""
    from springtide.on_ray.cluster.session import cluster

    with cluster(config, dashboard=False):
        if machinery:
            st.train(config)
        else:
            _without(config)
    steps = _steps(_run(config))[settled:]
    return {"step_s": statistics.median(step.step_time_s for step in steps)}


def _without(config: Config) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from springtide.on_ray.train.mailbox import open_mailbox
    from springtide.on_ray.train.worker import TrainJob, work
    from springtide.track.journal import Journal

    mailbox, folder = open_mailbox(config.run.id), Folder(config.run.root) / config.run.id
    config = config.override({"checkpoint.memory_every": 0})
    trainer = TorchTrainer(
        functools.partial(work, TrainJob(config, mailbox)),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config.elastic.max_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="bare", storage_path=f"{config.run.root}/ray"),
    )
    training = threading.Thread(target=trainer.fit)
    training.start()
    with Journal(folder) as journal:
        while training.is_alive():
            for event in mailbox.take(0.5).get():
                journal(event)


def config_of(root: str, small: bool, steps: int = 100_000, workers: int = NODES) -> Config:
    """Four layers of 128, a step of a quarter of a second on two cores."""
    base = configs.recipes.tiny()
    rows = 24
    changes = {
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "model.num_layers": 4,
        "model.dim": 128,
        "model.ffn_dim": 352,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": workers,
        "checkpoint.every_steps": 10,
        "train.total": steps * rows * base.shards.sequence_length,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return st.prepare(base.override({**changes, **(SMALL if small else {})}))


def measure(root: str, rounds: int, pace: Pace) -> dict[str, list[dict[str, float]]]:
    """Each client in each round, in turn another one first; a client that does not get there is said to."""
    config = config_of(root, pace is QUICK)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for number in range(rounds):
        names = list(CLIENTS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            _say(f"round {number + 1}: {name}")
            here = config.override({"run.id": f"{name.replace('_', '-')}-{number}"})
            try:
                found[name].append(claims.alone(CLIENTS[name], here, pace))
                _say(f"  {found[name][-1]}")
            except EOFError:
                _say(f"  {name} did not get there")
    return found


def measure_steady(root: str, rounds: int, pace: Pace) -> dict[str, float]:
    """Medians over rounds of the median step, and of the ratio of a round."""
    config = config_of(root, pace is QUICK, pace.steady, workers=2)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for machinery in (True, False) if number % 2 else (False, True):
            here = config.override({"run.id": f"steady-{number}-{machinery}"})
            times[machinery].append(claims.alone(steady, here, machinery, pace.settled)["step_s"])
            _say(f"steady, {'with' if machinery else 'without'}: {times[machinery][-1] * 1e3:.1f} ms")
    ratios = [ours / bare for ours, bare in zip(times[True], times[False], strict=True)]
    medians = {"with": statistics.median(times[True]), "without": statistics.median(times[False])}
    return {**medians, "ratio": statistics.median(ratios)}


def judge(found: dict[str, list[dict[str, float]]], steps: dict[str, float]) -> list[dict[str, Any]]:
    """The claims."""
    table = {
        name: {
            key: statistics.median(one[key] for one in rounds if key in one)
            for key in sorted({key for one in rounds for key in one})
        }
        for name, rounds in found.items()
    }
    judged = []
    for event in EVENTS:
        for peer in ("bare_ray", "torchrun"):
            theirs, ours = (table.get(name, {}).get(f"{event}_gap_s") for name in (peer, "springtide"))
            if theirs and ours:
                ratio = theirs / ours
                goal = GOALS[event] if peer == "bare_ray" else 1.0
                judged.append(claims.claim(f"{event}_gap_vs_{peer}", ratio, goal, "higher", table))
    for event, most in LOST.items():
        if worsts := [
            lost for one in found.get("springtide", []) if (lost := one.get(f"{event}_steps_lost")) is not None
        ]:
            worst = max(worsts)
            judged.append(claims.claim(f"{event}_steps_lost", worst, most, "lower", table))
    judged.append(claims.claim("steady_state_cost", steps["ratio"], 1.03, "lower", steps))
    return judged


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """A row a client."""
    columns = [f"{event}_{what}" for event in EVENTS for what in ("gap_s", "steps_lost")]
    print("  ".join(["client    ", *(f"{column:>17}" for column in columns)]))
    for name, rounds in found.items():
        cells = [" / ".join(f"{one[column]:.1f}" if column in one else "-" for one in rounds) for column in columns]
        print("  ".join([f"{name:10}", *(f"{cell:>17}" for cell in cells)]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, judge."""
    options = claims.options(__doc__, rounds=2, text="only", steady=(5, 1))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a driver whose cluster has ended would join whichever else is here
    only = options.only or ("springtide" if options.quick else "")  # a round of the peers takes minutes
    for peer in set(CLIENTS) - {only} if only else ():
        del CLIENTS[peer]
    pace = QUICK if options.quick else Pace()
    if options.quick:  # the drill of the tests has the others
        EVENTS.clear()
        EVENTS["kill"] = NODES - 1
    with tempfile.TemporaryDirectory() as root:
        found = measure(root, options.rounds, pace)
        steps = measure_steady(root, int(options.steady), pace)
    show(found)
    claims.show(options, judge(found, steps))


if __name__ == "__main__":
    main()
