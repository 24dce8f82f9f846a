"""What the control plane costs: waiting for capacity at 1,000 nodes, and the chain, the journal and all observers in each step.

Waiting: the real scaling policy looks at 1,000 nodes that are one short of what the run needs, for a while of real time; its
thread's processor time over that time. Ray's table of the nodes is made here as Ray makes it, one dict a node; the request to
Ray's control store and its answer's way are not in the figure.

A step: processor time of a link of the chain and of the journal's part of a step, over that of one training step of a
4M-parameter model on one thread. The journal is measured on a local disk, on an object store in memory (its thread's puts
included), and with a store that is away, where events are kept and closed segments go to files. The observers are measured with
all of them on: the meter of energy on each rank; in the driver the metrics for Ray, the commands to the run, the console, and a
listener of the user's own that does nothing, its thread included. What threads of MLflow and Ray send is not in the figure.

    python benchmarks/control_plane.py [--quick] [--json] [--nodes 1000] [--wait 60] [--steps 20000]
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import claims
import rich.console
from fsspec.implementations.memory import MemoryFileSystem

from springtide import config as configs
from springtide.config.steps import OrderStep, StepsDone
from springtide.events import StepDone
from springtide.storage import Folder
from springtide.stream.chain import next_chain
from springtide.tracking.journal import Journal

GOAL_OF_A_CORE = 0.01
GOAL_OF_A_STEP = 0.005


def waiting(nodes: int, wait_s: float) -> dict[str, Any]:
    """Share of a core that waiting for one more node takes."""
    from ray.train import ScalingConfig

    from springtide.elastic.allocation import WorkerShare
    from springtide.elastic.group_sizes import MemoryLimits
    from springtide.elastic.policy import Bounds
    from springtide.ray.cluster import nodes as cluster
    from springtide.ray.train.job import TrainJob
    from springtide.ray.train.mailbox import Progress
    from springtide.ray.train.scaling_policy import SpringtideScalingPolicy
    from springtide.ray.train.worker_lender import WorkerLender

    names = [f"{number:056x}" for number in range(nodes)]
    looks = itertools.count()

    def table() -> list[dict[str, Any]]:
        next(looks)
        return [
            {
                "NodeID": name,
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": 1,
                "Resources": {"CPU": 8.0, "GPU": 8.0, f"node:{name}": 1.0},
                "Labels": {},
            }
            for name in names
        ]

    reply = lambda value=None: SimpleNamespace(get=lambda timeout_s=None: value)  # noqa: E731
    mailbox: Any = SimpleNamespace(progress=lambda: reply(Progress()), post=lambda events: reply())
    allowed = WorkerShare({name: {"CPU": 1.0} for name in names})
    share: Any = SimpleNamespace(mine=lambda timeout_s, holds, most: allowed)
    bounds = Bounds(nodes + 1, nodes + 1)
    scaling = ScalingConfig(num_workers=(nodes + 1, nodes + 1), resources_per_worker={"CPU": 1})
    job = TrainJob(
        configs.recipes.tiny().override({"checkpoint.memory_every": 0}), mailbox
    )  # nothing to save meanwhile
    with (
        mock.patch.object(cluster.ray, "nodes", table),
        mock.patch.object(cluster.state, "get_draining_nodes", dict),
    ):
        policy = SpringtideScalingPolicy(scaling, bounds, job, None, WorkerLender(share), MemoryLimits(1))
        policy._maybe_send_resource_request = lambda: None
        begin_s, cpu_s = time.monotonic(), time.thread_time()
        while time.monotonic() - begin_s < wait_s:
            policy.make_decision_for_non_running_worker_group()
        cpu_s, took_s = time.thread_time() - cpu_s, time.monotonic() - begin_s
    count = next(looks)
    return {"share": cpu_s / took_s, "looks": count, "look_ms": 1e3 * cpu_s / count, "wait_s": took_s}


def step_cpu(quick: bool) -> dict[str, Any]:
    """Processor time of one training step on one thread [s]."""
    import growth
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        cell = growth.Cell(growth.config_of("step", **growth.BASE))
        taken = []
        for _ in range(2 if quick else 10):
            begin_s = time.process_time()
            cell.step()
            taken.append(time.process_time() - begin_s)
        dist.destroy_process_group()
    return {"step_s": statistics.median(taken), "parameters": cell.facts["parameters"]}


def chain_cpu(steps: int) -> float:
    """Processor time of one link [s]."""
    chain, begin_s = "", time.thread_time()
    for step in range(steps):
        chain = next_chain(chain, OrderStep(step), step * 0x9E3779B97F4A7C15 & (1 << 64) - 1, 1024, True)
    return (time.thread_time() - begin_s) / steps


def journal_cpu(steps: int, where: str) -> dict[str, Any]:
    """Processor time of the journal for one step, of all its threads [s]. ``where``: disk, store or away."""
    logging.getLogger("springtide").setLevel(logging.ERROR)

    def away(*arguments: Any, **named: Any) -> None:
        raise OSError("503 Slow Down")

    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-journal-"))
        run = Folder(root if where == "disk" else f"memory://journal-{where}") / "run"
        with Journal(run, term=1) as journal:
            if where == "away":
                stack.enter_context(mock.patch.object(MemoryFileSystem, "pipe_file", away))
            events = [_event(step) for step in range(1, steps + 1)]
            begin_s = time.process_time()
            for event in events:
                journal(event)
            if where == "store":
                journal.flush()
            cpu_s = time.process_time() - begin_s
            stack.close()  # the store is back
    return {"cpu_s": cpu_s / steps, "where": where}


def observers_cpu(steps: int) -> dict[str, Any]:
    """Processor time of each observer for one step, of all its threads [s]."""
    import torch

    from springtide.api.control import Controls
    from springtide.ray.train.driver_listeners import RayMetrics
    from springtide.ray.train.worker_lender import WorkerLender
    from springtide.run.folder import Run
    from springtide.tracking.console import Console
    from springtide.tracking.own_listener import OwnListener
    from springtide.training.energy import EnergyMeter, counter_of
    from springtide.training.part import Work

    events, found = [_event(step) for step in range(1, steps + 1)], dict[str, float]()
    work = Work(torch.zeros(0, 1, dtype=torch.int64), [], 1)
    meter, here = EnergyMeter(counter_of(None)), SimpleNamespace(step=0)

    def count_energy(event: StepDone) -> None:
        meter.before_step(work)
        meter.take()
        list(meter.after_step(here))

    with tempfile.TemporaryDirectory(prefix="springtide-observers-") as root:
        config = configs.recipes.tiny().override({"run.root": root})
        controls = Controls(config, Run(Folder(f"{root}/run")), WorkerLender(), 0)
        with open(os.devnull, "w") as nowhere, RayMetrics("run") as metrics:
            console = Console(steps, console=rich.console.Console(file=nowhere))
            each = {"energy": count_energy, "metrics": metrics, "commands": controls, "console": console}
            for name, hear in each.items():
                begin_s = time.process_time()
                for event in events:
                    hear(event)
                found[name] = (time.process_time() - begin_s) / steps
        begin_s = time.process_time()
        with OwnListener("none", lambda: lambda event: None, most_waiting=steps) as own:
            for event in events:
                own(event)
        found["own listener"] = (time.process_time() - begin_s) / steps  # its thread has told all
    return {"cpu_s": found}


def _event(step: int) -> StepDone:
    return StepDone(
        step=StepsDone(step),
        loss=2.345678901234,
        grad_norm=0.987654321,
        learning_rate=1e-3,
        tokens=step * 1024,
        step_tokens=1024,
        step_time_s=0.25,
        data_wait_s=0.0004,
        tokens_per_s=4096.0,
        mfu=0.5,
        memory_bytes=1 << 30,
        world_size=2,
        digest=f"{step:016x}",
        time_s=1_700_000_000.0 + step,
    )


def main() -> None:
    """Print the figures and the claims."""
    options = claims.options(__doc__, rounds=3, nodes=(1000, 50), wait=(60, 2), steps=(20_000, 500))
    nodes, steps = int(options.nodes), int(options.steps)
    waits = [claims.alone(waiting, nodes, options.wait) for _ in range(int(options.rounds))]
    for one in waits:
        print(
            f"waiting at {nodes} nodes: {one['share']:.3%} of a core, {one['looks']} looks of {one['look_ms']:.2f} ms"
        )
    found = [
        claims.claim("waiting_share_of_a_core", max(one["share"] for one in waits), GOAL_OF_A_CORE, "lower", waits)
    ]
    step = claims.alone(step_cpu, options.quick)
    link_s = min(chain_cpu(steps) for _ in range(int(options.rounds)))
    print(f"a step of {step['parameters'] / 1e6:.1f}M parameters: {step['step_s'] * 1e3:.1f} ms of one core")
    print(f"a link of the chain: {link_s * 1e6:.1f} us, {link_s / step['step_s']:.4%} of the step")
    worst_s, details = 0.0, []
    for where in ("disk", "store", "away"):
        cpu_s = statistics.median(claims.alone(journal_cpu, steps, where)["cpu_s"] for _ in range(int(options.rounds)))
        print(f"the journal, {where}: {cpu_s * 1e6:.1f} us a step, {cpu_s / step['step_s']:.4%} of the step")
        details.append({"where": where, "cpu_s": cpu_s})
        worst_s = max(worst_s, cpu_s)
    share = (link_s + worst_s) / step["step_s"]
    found.append(claims.claim("chain_and_journal_share_of_a_step", share, GOAL_OF_A_STEP, "lower", [step, *details]))
    rounds = [claims.alone(observers_cpu, steps)["cpu_s"] for _ in range(int(options.rounds))]
    observers = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    told = ", ".join(f"{name} {cpu_s * 1e6:.1f}" for name, cpu_s in observers.items())
    share = sum(observers.values()) / step["step_s"]
    print(f"observers: {sum(observers.values()) * 1e6:.1f} us a step ({told}), {share:.4%} of the step")
    found.append(claims.claim("observers_share_of_a_step", share, GOAL_OF_A_STEP, "lower", [step, observers]))
    claims.show(options, found)


if __name__ == "__main__":
    main()
