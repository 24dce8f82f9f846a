"""`springtide plan` beside real runs: memory and time of a step as it forecasts them, and as this machine has them.

The node type is this machine, a core a worker: the FLOP/s of its matrix product, the speed of its memory and of gloo between
two processes are measured at the start, by both at once. Every core trains, as on a cluster: beside a run of one worker there
is another one. One run, the first of each round, calibrates the roofline (`--measured`); five others,
of other sizes, layouts and numbers of workers, are forecast and then trained. Rounds alternate. Wall time is what a plan is
about, and processor time stands beside it, calibrated by itself: where others use the machine, wall time is theirs, too. Memory
is the most that the C library had given out at once in a second step, asked after each operation, as in benchmarks/layouts.py.

    python benchmarks/plan.py [--quick] [--json] [--rounds 5] [--steps 6]
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import claims

import springtide as st
from springtide.config import Config, build

WARM_UP = 3
"""Steps that do not count, as in a plan's calibration."""
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "calibration": (1, {"model.num_layers": 4, "model.dim": 256, "model.ffn_dim": 688}),
    "narrow": (1, {"model.num_layers": 6, "model.dim": 128, "model.ffn_dim": 384}),
    "wide": (1, {"model.num_layers": 2, "model.dim": 512, "model.ffn_dim": 1376, "model.num_heads": 8}),
    "deep": (
        1,
        {"model.num_layers": 10, "model.dim": 256, "model.ffn_dim": 688, "parallel.recompute": "full"},
    ),
    "two_zero3": (
        2,
        {"model.num_layers": 4, "model.dim": 384, "model.ffn_dim": 1024, "parallel.strategy": "zero3"},
    ),
    "two_zero1": (2, {"model.num_layers": 8, "model.dim": 256, "model.ffn_dim": 688}),
}
"""Run -> its workers, and where it differs from the recipe `demo`."""
QUICK = {"corpus.tokenizer": "bytes", "shards.heldout_fraction": 0.1}
QUICK_SHAPES = {
    "calibration": (1, {"model.num_layers": 1, "model.dim": 64, "model.ffn_dim": 160}),
    "wide": (1, {"model.num_layers": 2, "model.dim": 96, "model.ffn_dim": 256}),
}
CLUSTER = """
node_types:
  - name: here
    device: {{name: a core, memory: {memory}, flops: {flops}, bandwidth: {bandwidth}}}
    host_memory: {memory}
    prices: {{on_demand: 0.05}}
    links: {{between: {link}}}
    max_nodes: 2
"""


class Group:
    """Processes of one number of workers, which wait for what to do: no run pays for the start of another."""

    def __init__(self, workers: int) -> None:
        self._store, where = claims.meeting_place()
        environment = os.environ | where | {"WORLD_SIZE": str(workers)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                env=environment | {"RANK": str(number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(workers)
        ]

    def ask(self, what: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Have it done; what rank 0 found."""
        self.begin(what, config)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for what rank 0 found."""
        assert self._ranks[0].stdout is not None
        for line in self._ranks[0].stdout:
            if line.startswith("{"):
                print(line.strip(), file=sys.stderr, flush=True)
                return dict(json.loads(line))
        raise RuntimeError("a rank has ended")

    def begin(self, what: str, config: dict[str, Any] | None = None) -> None:
        """Have it done, and do not wait."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"what": what, "config": config}) + "\n")
            process.stdin.flush()

    def end(self) -> None:
        """Wait until its processes have ended."""
        for process in self._ranks:  # all, before the first is waited for: they leave their group together
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            process.wait()


def rank() -> None:
    """What each process of a group does, line by line; rank 0 answers with a line."""
    import torch

    from springtide.distributed import process_group

    torch.set_num_threads(1)
    with process_group("cpu"):
        for line in sys.stdin:
            told = json.loads(line)
            found = facts() if told["what"] == "facts" else trained(build(told["config"]), told["what"] == "memory")
            if int(os.environ["RANK"]) == 0:
                print(json.dumps(found), flush=True)


def facts() -> dict[str, float]:
    """What this machine can do: the best of several tries."""
    import torch
    import torch.distributed as dist

    from springtide.training.device import peak_flops

    source, target = torch.ones(2**25), torch.empty(2**25)
    gradient = torch.zeros(2**22)
    copies, sums = [], []
    for _ in range(8):
        begin = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - begin)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(gradient)
        sums.append(time.perf_counter() - begin)
    flops, _ = peak_flops(torch.device("cpu"))
    # a ring of two moves the gradient once over each link
    link = gradient.nbytes / min(sums) if dist.get_world_size() > 1 else 1e9
    return {"flops": flops, "bandwidth": 2 * source.nbytes / min(copies), "link": link}


def trained(config: Config, metered: bool) -> dict[str, Any]:
    """Train some steps as a rank; what one took, or the most that the second one held."""
    import torch

    from springtide.distributed import world
    from springtide.events import StepDone
    from springtide.planning.step_memory import Meter
    from springtide.storage import Folder
    from springtide.stream import load, open_data
    from springtide.tracking.journal import Journal
    from springtide.training import TrainLoop

    run = st.Run(Folder(config.run.root) / config.run.id)
    walls, cpus, most = [], [], 0.0
    with contextlib.ExitStack() as stack:
        meter = Meter(torch.device("cpu"))  # what there is before the model does not count
        loop = TrainLoop(config, world("cpu", 0, config.parallel.shards), open_data(config.data), run.folder)
        if loop.world.is_first:
            run.write_config(config)
        journal = stack.enter_context(Journal(run.folder, enabled=loop.world.is_first))
        events = loop.events(
            lambda reader, step: load(reader, reader.plan(step, config.num_steps, 2**16)), lambda: None
        )
        stack.callback(events.close)
        before = time.process_time()
        for event in events:
            journal(event)
            if not isinstance(event, StepDone):
                continue
            now = time.process_time()
            walls.append(event.step_time_s)
            cpus.append(now - before)
            before = now
            if event.step == config.num_steps - 1:  # nobody needs what a run does at its end
                break
            if metered and event.step == 1:  # the first one makes the moments; to ask after each operation is slow
                stack.enter_context(meter)
                meter.lap()
            if metered and event.step == 2:
                most = meter.lap()
                break
        found = {"parameters": loop.figures.num_parameters, "vocabulary": loop.data.vocab_size}
    if metered:
        return {**found, "bytes": most}
    wall_s, cpu_s = (statistics.median(times[WARM_UP:]) for times in (walls, cpus))
    return {**found, "wall_s": wall_s, "cpu_s": cpu_s, "load": os.getloadavg()[0]}


def base(folder: str, steps: int, quick: bool) -> Config:
    """What all runs share."""
    changes = {
        "run.root": f"{folder}/runs",
        "shards.root": f"{folder}/datasets",
        "corpus.max_files": 40,
        "shards.sequence_length": 64,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "train.total": (WARM_UP + steps + 1) * 8 * 64,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "optim.warmup": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.stage": "",
        "checkpoint.memory_every": 0,
        "elastic.recheck": 0,
        "elastic.compare": 0,
        "parallel.reduction": "fp32",
        "parallel.threads": 1,
    }
    return st.prepare(st.recipes.demo().override({**changes, **(QUICK if quick else {})}))


def config_of(common: Config, name: str, shape: dict[str, Any], mark: str) -> dict[str, Any]:
    """The whole config of a run, as plain data."""
    return common.override({"run.id": f"{name}-{mark}", **shape}).model_dump(mode="json")


def forecast(common: Config, shape: tuple[int, dict[str, Any]], cluster: str, measured: str, vocabulary: int) -> Any:
    """The row of a plan for a run."""
    workers, changes = shape
    found = st.plan(common.override(changes), cluster, measured, vocab_size=vocabulary)
    return next(row for row in found.rows if row.world_size == workers)


def main() -> None:
    """Print the table and the claims."""
    options = claims.options(__doc__, rounds=5, steps=(6, 5))
    shapes = QUICK_SHAPES if options.quick else SHAPES
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        common = base(folder, int(options.steps), options.quick)
        groups = {workers: Group(workers) for workers in sorted({workers for workers, _ in shapes.values()})}
        beside = Group(1)
        stack.callback(beside.end)
        for workers, group in groups.items():
            stack.callback(group.end)
            # what libraries take for themselves at first is no run's
            group.ask("memory", config_of(common, f"first-{workers}", shapes["calibration"][1], "memory"))
        here = groups[max(groups)].ask("facts")
        figures = {name: int(value) for name, value in here.items()}
        cluster = Path(folder, "here.yaml")
        cluster.write_text(CLUSTER.format(memory=8 * 2**30, **figures))
        held = {
            name: groups[workers].ask("memory", config_of(common, name, shape, "memory"))
            for name, (workers, shape) in shapes.items()
        }
        rounds = []
        for number in range(options.rounds):
            took = {}
            for name, (workers, shape) in shapes.items():
                if workers == 1:
                    beside.begin("time", config_of(common, name, shape, f"{number}-beside"))
                took[name] = groups[workers].ask("time", config_of(common, name, shape, f"{number}"))
                if workers == 1:
                    beside.answer()
            measured = f"{common.run.root}/calibration-{number}"
            rows = {
                name: forecast(common, shape, str(cluster), measured, took[name]["vocabulary"])
                for name, shape in shapes.items()
            }
            rounds.append((took, rows))
        begin, cpu = time.perf_counter(), time.process_time()
        st.plan(common, str(cluster))
        answer = {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
    speeds = f"{here['flops'] / 1e9:.1f} GFLOP/s a core, {here['bandwidth'] / 1e9:.1f} GB/s, gloo {here['link'] / 1e9:.2f} GB/s"
    print(f"this machine: {speeds}; a plan takes {answer['wall_s']:.3f} s, {answer['cpu_s']:.3f} s of processor")
    show(options, shapes, held, rounds)


def show(options: Any, shapes: dict[str, Any], held: dict[str, Any], rounds: list[Any]) -> None:
    """Print the table, and the claims about what it shows."""
    print(
        "| run | workers | parameters | forecast | held | ratio | step, wall | forecast / wall | forecast / processor |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    memory, wall, cpu = {}, {}, {}
    for name, (workers, _) in shapes.items():
        row, bytes_held = rounds[0][1][name], held[name]["bytes"]
        ratios: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
        for took, rows in rounds:
            ratios["wall_s"].append(rows[name].step_s / took[name]["wall_s"])
            # a calibration of its own: the same parts, with the efficiency of the processor's seconds
            scale = took["calibration"]["cpu_s"] / took["calibration"]["wall_s"]
            ratios["cpu_s"].append(rows[name].step_s * scale / took[name]["cpu_s"])
        walls = [took[name]["wall_s"] for took, _ in rounds]
        memory[name] = row.memory_bytes / bytes_held
        wall[name], cpu[name] = ratios["wall_s"], ratios["cpu_s"]
        print(
            f"| {name} | {workers} | {held[name]['parameters'] / 1e6:.2f}M | {row.memory_bytes / 2**20:.1f} MiB "
            f"| {bytes_held / 2**20:.1f} MiB | {memory[name]:.3f} | {spread(walls, 's')} | {spread(wall[name])} "
            f"| {spread(cpu[name])} |"
        )
    loads = [took["calibration"]["load"] for took, _ in rounds]
    print(f"load of the machine in the rounds: {', '.join(f'{load:.1f}' for load in loads)}")
    checked = [name for name in shapes if name != "calibration"]
    claims.show(
        options,
        [
            claims.claim("plan_memory_off", max(abs(one - 1) for one in memory.values()), 0.1, "lower", memory),
            claims.claim("plan_time_off", worst(wall, checked), 0.15, "lower", wall),
            claims.claim("plan_time_off_processor", worst(cpu, checked), 0.15, "lower", cpu),
        ],
    )


def worst(ratios: dict[str, list[float]], names: list[str]) -> float:
    """How far the median of the run that is forecast worst is off."""
    return max(abs(statistics.median(ratios[name]) - 1) for name in names)


def spread(values: list[float], unit: str = "") -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}){' ' * bool(unit)}{unit}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank()
    else:
        main()
