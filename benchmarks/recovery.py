"""What a lost, an announced and a new node cost: springtide, bare Ray Train elastic, torchrun elastic, torchft.

Three nodes on this machine train the same model; one is announced to go and goes, one is killed, one joins. The first three
clients run the same training loop with the same checkpoints, every ten steps, so that only who restarts it, and from what,
differs:

    springtide    st.train: notices, memory tier, processes that outlive their group
    bare Ray      TorchTrainer(num_workers=(1, 3)) with Ray's own elastic policy, as it comes; nodes as in ours
    torchrun      --nnodes=1:3 --rdzv-backend=c10d, as it comes; a notice is SIGTERM to the agent, as a spot handler would send
    torchft       the same model and batch in three replica groups (recovery_torchft.py), with managed all-reduce; as it comes
    torchft_tuned with a heartbeat's time-out of a second instead of five

A gap is the time from the end of the last step before to the end of the first step after, less a usual step after; of torchft,
whose survivors do not restart, this is summed over the steps at which its quorum or its number of replicas changes. What
training through a notice until the node goes saves and then loses shows in the steps lost. ``second_kill``, of ours only, kills
another of three nodes as soon as the first loss is known. Samples: of those that an undisturbed run would have trained on by
the same step, how many were not (lost) and how many times one was again (repeated). Loss off: how far the last loss is from
that of the same client undisturbed. ``steady`` compares a step with memory tier and policy to one without, on Ray.

    python benchmarks/recovery.py [--only CLIENT,CLIENT] [--quick] [--json] [--rounds 2] [--steady 5]
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))

import claims
import psutil
import recovery_phases
import recovery_torchft
from ports import reserve

import springtide as st
from springtide import config as configs
from springtide.config import Config
from springtide.events import Event, Failed, StepDone
from springtide.run.folder import Run
from springtide.storage import Folder

NODES = 3
PATIENCE_S = 240.0
EVENTS = {"notice": -1, "kill": -1, "grow": 1, "grow_again": 1, "second_kill": -2}
"""What can happen, and by how many workers it changes the group."""
USUAL = ("notice", "kill", "grow")
"""What happens to every client."""
GOALS = {"notice": 15.0, "kill": 40.0, "grow": 1.0}
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
    events: tuple[str, ...] = USUAL
    """What happens, in this order."""


SMALL = {"corpus.max_files": 40, "model.num_layers": 2, "model.dim": 64, "model.ffn_dim": 160}
"""For --quick."""
QUICK = Pace(6.0, 8, 8, 10, 40, ("kill",))


class Nodes(Protocol):
    """What can happen to a cluster."""

    def notice(self) -> None:
        """One is told that it will go, and goes ``Pace.notice_s`` later."""

    def grow(self) -> None:
        """One joins."""

    def kill(self) -> None:
        """One goes."""


def play(nodes: Nodes, told: Callable[[], list[Event]], pace: Pace) -> dict[str, float]:
    """Let everything happen, each when training goes on again; gap and steps lost of each, as far as it got. ``told``: returns
    the events of the client so far."""
    workers = NODES
    _until(told, workers, pace.before, time.time())
    began: dict[str, float] = {}
    for event in pace.events:
        begin, workers = time.time(), workers + EVENTS[event]
        if event == "second_kill":
            nodes.kill()
            _await_failure(told, begin)
            nodes.kill()
        else:
            getattr(nodes, event.removesuffix("_again"))()
        try:
            _until(told, workers, pace.after, begin)
        except TimeoutError as error:
            _say(f"  {event}: {error}")
            break
        began[event] = begin
        _say(f"  {event}: trains on with {workers}")
    return _costs(recovery_phases.restarts(told()), began)


def _until(told: Callable[[], list[Event]], workers: int, steps: int, since: float) -> None:
    """Until ``workers`` have done ``steps`` since then."""
    deadline = time.time() + PATIENCE_S
    while True:
        done = [one for one in _steps(told()) if one.world_size == workers and one.time_s > since]
        if len(done) >= steps:
            return
        if time.time() > deadline:
            raise TimeoutError(f"{workers} workers did not do {steps} steps in {PATIENCE_S:.0f} s")
        time.sleep(0.2)  # between looks


def _await_failure(told: Callable[[], list[Event]], since: float) -> None:
    """Until it is known that a group has failed since then: from now on a restart is under way."""
    deadline = time.time() + PATIENCE_S
    while not any(isinstance(one, Failed) and one.time_s > since for one in told()):
        if time.time() > deadline:
            raise TimeoutError(f"no group failed in {PATIENCE_S:.0f} s")
        time.sleep(0.02)  # between looks


def _steps(events: list[Event]) -> list[StepDone]:
    return [one for one in events if isinstance(one, StepDone)]


def _told(run: Run) -> list[Event]:
    return list(run.events) if run.folder.exists("journal") else []


def _costs(restarts: list[recovery_phases.Restart], began: dict[str, float]) -> dict[str, float]:
    costs = {}
    ends = [*list(began.values())[1:], time.time()]
    for (event, begin), end in zip(began.items(), ends, strict=False):
        mine = [one for one in restarts if begin < one.first.time_s <= end]
        costs[f"{event}_gap_s"] = sum(one.gap_s for one in mine)
        costs[f"{event}_steps_lost"] = float(sum(one.steps_lost for one in mine))
        costs[f"{event}_began_s"] = begin
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
    pace = pace._replace(events=(*pace.events, *(("grow_again", "second_kill") if pace is not QUICK else ())))
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
    agents = _Agents(_resolved(config), pace.notice_s)
    try:
        return play(agents, functools.partial(_told, _run(config)), pace)
    finally:
        agents.end()


def torchft(config: Config, pace: Pace) -> dict[str, float]:
    """torchft as it comes."""
    return _on_replicas(config, pace, recovery_torchft.DEFAULT)


def torchft_tuned(config: Config, pace: Pace) -> dict[str, float]:
    """torchft with shorter time-outs."""
    return _on_replicas(config, pace, recovery_torchft.TUNED)


def _on_replicas(config: Config, pace: Pace, times: recovery_torchft.Times) -> dict[str, float]:
    with recovery_torchft.Replicas(config, NODES, times) as replicas:
        return play(replicas, replicas.told, pace)


CLIENTS: dict[str, Callable[[Config, Pace], dict[str, float]]] = {
    "springtide": springtide,
    "bare_ray": bare_ray,
    "torchrun": torchrun,
    "torchft": torchft,
    "torchft_tuned": torchft_tuned,
}
LOOPS = ("springtide", "bare_ray", "torchrun")
"""Those that run our loop, and have its journal."""


def _cluster() -> Any:
    """Of this process, which tells what it found before the cluster ends: who still trains on it may take the process along."""
    from springtide.ray.cluster.local import LocalCluster

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
        return play(nodes, functools.partial(_told, run), pace)
    finally:
        nodes.end()


def _run(config: Config) -> Run:
    return Run(Folder(config.run.root) / config.run.id)


def steady(config: Config, machinery: bool, settled: int) -> dict[str, float]:
    """Median seconds of a step on Ray, with all that elasticity needs or with none of it."""
    from springtide.ray.cluster.session import cluster

    with cluster(config, dashboard=False):
        if machinery:
            st.train(config)
        else:
            _without(config)
    steps = _steps(_told(_run(config)))[settled:]
    return {"step_s": statistics.median(step.step_time_s for step in steps)}


def _without(config: Config) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from springtide.ray.train.job import TrainJob
    from springtide.ray.train.mailbox import open_mailbox
    from springtide.ray.train.worker import work
    from springtide.tracking.journal import Journal

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
        "parallel.reduction": "fp64",  # a loss that is off is then a fault: fp32 sums alone differ by percents after 50 steps
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


def measure(config: Config, rounds: int, pace: Pace) -> dict[str, list[dict[str, float]]]:
    """Each client in each round, in turn another one first; a client that does not get there is said to."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for number in range(rounds):
        names = list(CLIENTS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            _say(f"round {number + 1}: {name}, load {os.getloadavg()[0]:.1f}")
            here = config.override({"run.id": _id(name, number)})
            try:
                found[name].append(claims.alone(CLIENTS[name], here, pace) | {"round": number})
                _say(f"  {found[name][-1]}")
            except EOFError:
                _say(f"  {name} did not get there")
    return found


def _id(client: str, number: int) -> str:
    return f"{client.replace('_', '-')}-{number}"


def compare(config: Config, found: dict[str, list[dict[str, float]]]) -> None:
    """Add to each measurement the samples lost and repeated and the distance of its loss from an undisturbed run's."""
    runs = {
        (name, int(one["round"])): config.override({"run.id": _id(name, int(one["round"]))})
        for name, rounds in found.items()
        for one in rounds
    }
    loops = {key: _steps(_told(_run(here))) for key, here in runs.items() if key[0] in LOOPS}
    if loops:
        most = max(steps[-1].step for steps in loops.values())
        _say(f"undisturbed: {most} steps")
        alone = {one.step: one for one in _steps(_undisturbed(config, most))}
    replicas = {key: recovery_torchft.tries(Path(here.run.root), here.run.id) for key, here in runs.items()}
    replicas = {key: tries for key, tries in replicas.items() if tries}
    if replicas:
        _say("undisturbed: torchft")
        heldout = recovery_torchft.undisturbed(config.override({"run.id": "torchft-alone"}), NODES, replicas.values())
    for name, rounds in found.items():
        for one in rounds:
            key = name, int(one["round"])
            if key in loops:
                one |= _changed(loops[key], alone, config.stream.global_batch)
            else:
                one |= recovery_torchft.changed(replicas[key], heldout, config.stream.global_batch, NODES)


def _undisturbed(config: Config, steps: int) -> list[Event]:
    """Return the events of our loop in one process, for at least this number of steps."""
    config = config.override({"run.id": "alone"})
    command = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "springtide.training"],
    ]
    process = psutil.Popen(
        [*command, "--config", _resolved(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _until(functools.partial(_told, _run(config)), 1, steps, 0.0)
    finally:
        _end(process)
    return _told(_run(config))


def _changed(steps: Sequence[StepDone], alone: dict[int, StepDone], rows: int) -> dict[str, float]:
    """What the model of a run has seen, by the digest that each step has of its samples: a step that is done again counts as
    done once, for its first time is undone."""
    last = {one.step: one for one in steps}
    others = sum(one.digest != alone[step].digest for step, one in last.items())
    end = max(last)
    off = abs(last[end].loss - alone[end].loss)
    return {"samples_lost": float(rows * others), "samples_repeated": 0.0, "loss_off": off}


def _resolved(config: Config) -> str:
    """The config in a file."""
    resolved = Path(config.run.root, f"{config.run.id}.yaml")
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(configs.dump(config))
    return str(resolved)


def phases_of(config: Config, found: dict[str, list[dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    """Event -> where the gap went, of each of our restarts."""
    table: dict[str, list[dict[str, float]]] = {}
    for one in found.get("springtide", []):
        restarts = recovery_phases.restarts(
            _told(_run(config.override({"run.id": _id("springtide", int(one["round"]))})))
        )
        begins = {event: one[f"{event}_began_s"] for event in EVENTS if f"{event}_began_s" in one}
        ends = [*list(begins.values())[1:], time.time()]
        for (event, begin), end in zip(begins.items(), ends, strict=True):
            for restart in restarts:
                if begin < restart.first.time_s <= end:
                    table.setdefault(event, []).append(recovery_phases.phases(restart, begin))
    return table


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


def judge(
    found: dict[str, list[dict[str, float]]], phases: dict[str, list[dict[str, float]]], steps: dict[str, float] | None
) -> list[dict[str, Any]]:
    """The claims."""
    table = {
        name: {
            key: statistics.median(one[key] for one in rounds if key in one)
            for key in sorted({key for one in rounds for key in one})
        }
        for name, rounds in found.items()
    }
    detail = {**table, "phases": phases}
    ours, judged = table.get("springtide", {}), []
    for event in USUAL:
        for peer in ("bare_ray", "torchrun", "torchft_tuned"):
            theirs, mine = table.get(peer, {}).get(f"{event}_gap_s"), ours.get(f"{event}_gap_s")
            if theirs is not None and mine:
                name = f"{event}_gap_vs_{peer.removesuffix('_tuned')}"
                judged.append(
                    claims.claim(name, theirs / mine, GOALS[event] if peer == "bare_ray" else 1.0, "higher", detail)
                )
    if "second_kill_gap_s" in ours and ours["kill_gap_s"]:
        ratio = ours["second_kill_gap_s"] / ours["kill_gap_s"]
        judged.append(claims.claim("second_kill_gap_vs_first", ratio, 2.2, "lower", detail))
    for event, most in LOST.items():
        if worsts := [
            lost for one in found.get("springtide", []) if (lost := one.get(f"{event}_steps_lost")) is not None
        ]:
            worst = max(worsts)
            judged.append(claims.claim(f"{event}_steps_lost", worst, most, "lower", detail))
    if steps is not None:
        judged.append(claims.claim("steady_state_cost", steps["ratio"], 1.02, "lower", steps))
    return judged


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """A row a client."""
    events = [event for event in EVENTS if any(f"{event}_gap_s" in one for rounds in found.values() for one in rounds)]
    columns = {
        f"{event}_{what}": ".2f" if what == "gap_s" else ".0f" for event in events for what in ("gap_s", "steps_lost")
    }
    columns |= {"samples_lost": ".0f", "samples_repeated": ".0f", "loss_off": ".1e"}
    print("  ".join(["client       ", *(f"{column:>22}" for column in columns)]))
    for name, rounds in found.items():
        cells = [
            " / ".join(format(one[column], form) if column in one else "-" for one in rounds)
            for column, form in columns.items()
        ]
        print("  ".join([f"{name:13}", *(f"{cell:>22}" for cell in cells)]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, judge."""
    options = claims.options(__doc__, rounds=2, text="only", steady=(5, 1))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a driver whose cluster has ended would join whichever else is here
    left_out = set() if recovery_torchft.LIGHTHOUSE.exists() else {"torchft", "torchft_tuned"}
    if left_out:
        print(recovery_torchft.LEFT_OUT)
    only = set(filter(None, options.only.split(","))) or (
        {"springtide", "torchft_tuned"} if options.quick else set(CLIENTS)  # a round of the others takes minutes
    )
    for peer in set(CLIENTS) - (only - left_out):
        del CLIENTS[peer]
    pace = QUICK if options.quick else Pace()  # the drill of the tests has the other events
    with tempfile.TemporaryDirectory() as root:
        config = config_of(root, options.quick)
        found = measure(config, options.rounds, pace)
        if not options.quick:
            compare(config, found)
        phases = phases_of(config, found)
        steps = measure_steady(root, int(options.steady), pace) if options.steady else None
    show(found)
    recovery_phases.show(phases)
    claims.show(options, judge(found, phases, steps))


if __name__ == "__main__":
    main()
