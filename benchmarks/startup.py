"""Time from a command to its first training step, and from its last step to the prompt: springtide, its floor, and two peers.

    springtide    `springtide train --recipe tiny` on a prepared dataset, with a private Ray cluster, as a user types it
    floor         `ray.init` without a dashboard, then two actors that import torch and FSDP: what no run on Ray can be below
    bare Ray      Ray Train's TorchTrainer with two workers, as it comes: the same model under FSDP2, without checkpoints
    HF Trainer    transformers.Trainer under torchrun with two processes, on gloo: the same model, without checkpoints

The same model, rows and number of steps, two gloo processes with one thread each; nothing but the first loads a config, checks,
evaluates, saves or reports. A fresh process a measurement, contenders alternating, median of all rounds. CPU seconds are those
of the whole machine (/proc/stat), so that processes that Ray starts count: run it on a quiet one. The first round, whose files
may not be in the page cache, does not count.

    python benchmarks/startup.py [--quick] [--json] [--rounds 5]
"""

from __future__ import annotations

import itertools
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

WORKERS, STEPS = 2, 60
GOALS = {"startup_vs_floor": 1.3, "end_s": 3.0}
CONTENDERS = ("floor", "springtide", "bare_ray", "hf_trainer")
PHASES = ("step 0", "first step", "last step", "prompt")
"""What is timed from the command on: a worker is about to train; one step is done; all are; the command has returned."""
BEGIN = "command"
TELL = "SPRINGTIDE_BENCHMARK_MARKS"
"""Environment variable with the file that receives the marks of a measurement."""


def busy_s() -> float:
    """CPU time that this machine has spent since it started [s]."""
    user, nice, system, _idle, _iowait, irq, soft_irq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def mark(name: str) -> None:
    """Note that a measurement has come to ``name``; the first time counts. From any of its processes."""
    with open(os.environ[TELL], "a", encoding="utf-8") as file:
        file.write(json.dumps([name, time.time(), busy_s()]) + "\n")


def listener(_run: object) -> Any:
    """A ``track.listener`` that notes where a run is."""
    from springtide.events import Started, StepDone

    def hear(event: object) -> None:
        if isinstance(event, Started):
            mark("step 0")
        if isinstance(event, StepDone) and event.step in (1, STEPS):
            mark("first step" if event.step == 1 else "last step")

    return hear


def springtide(folder: Path) -> None:
    """The command, with marks where it calls Ray."""
    import ray

    from springtide.cli.main import entry

    init, shutdown = ray.init, ray.shutdown

    def timed_init(*arguments: Any, **named: Any) -> Any:
        mark("ray.init begins")
        found = init(*arguments, **named)
        mark("ray.init is done")
        return found

    def timed_shutdown() -> None:
        mark("ray.shutdown begins")
        shutdown()
        mark("ray.shutdown is done")

    ray.init, ray.shutdown = timed_init, timed_shutdown
    number = Path(os.environ[TELL]).stem
    words = ["train", "--recipe", "tiny", "--run.root", str(folder / "runs"), "--run.id", number]
    sys.argv = ["springtide", *words, "--elastic.max-workers", str(WORKERS), "--track.listener", "startup:listener"]
    entry()


def floor(_folder: Path) -> None:
    """Ray, and two processes that could train."""
    import ray

    class Worker:
        def ready(self) -> None:
            import torch.distributed.fsdp  # noqa: F401 - it is the import that is timed

    mark("ray.init begins")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=512 * 2**20)
    mark("ray.init is done")
    workers = [ray.remote(Worker).remote() for _ in range(WORKERS)]
    ray.get([worker.ready.remote() for worker in workers])
    for name in PHASES[:-1]:
        mark(name)
    ray.shutdown()


def train(rows: str, rank: int) -> None:
    """A rank of the loop that one would write by hand, in a process group that is there."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    model, rows_BL = model_of(), torch.load(rows)
    mesh = init_device_mesh("cpu", (WORKERS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if rank == 0:
        mark("step 0")
    for step in range(1, STEPS + 1):
        mine_BL = rows_BL[step % 8 :: 8][rank::WORKERS]
        F.cross_entropy(model(mine_BL[:, :-1]).flatten(0, 1).float(), mine_BL[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step in (1, STEPS):
            mark("first step" if step == 1 else "last step")


def model_of() -> Any:
    """The model of the recipe."""
    from springtide.config import recipes
    from springtide.model import build

    return build(recipes.tiny().model, 257)


def bare_ray(folder: Path) -> None:
    """Ray Train as it comes."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop(config: dict[str, str]) -> None:
        sys.path.insert(0, config["folder"])
        import startup

        startup.train(config["rows"], ray.train.get_context().get_world_rank())

    mark("ray.init begins")
    ray.init(address="local", num_cpus=4, log_to_driver=False, runtime_env={"env_vars": {TELL: os.environ[TELL]}})
    mark("ray.init is done")
    TorchTrainer(
        loop,
        train_loop_config={"rows": str(folder / "rows.pt"), "folder": str(Path(__file__).parent)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    mark("ray.shutdown begins")
    ray.shutdown()


def hf_trainer(folder: Path) -> None:
    """transformers.Trainer as it comes; this process is one rank of torchrun's."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()

        def forward(self, rows_BL: Tensor) -> dict[str, Tensor]:
            return {
                "loss": F.cross_entropy(self.inner(rows_BL[:, :-1]).flatten(0, 1).float(), rows_BL[:, 1:].flatten())
            }

    class Marks(TrainerCallback):
        def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
            self.tell("step 0")

        def on_step_end(self, _arguments: Any, state: Any, *_others: Any, **_named: Any) -> None:
            if state.global_step in (1, STEPS):
                self.tell("first step" if state.global_step == 1 else "last step")

        @staticmethod
        def tell(name: str) -> None:
            if os.environ["RANK"] == "0":
                mark(name)

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=6,
        max_steps=STEPS,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = [{"rows_BL": row} for row in torch.load(folder / "rows.pt")]
    Trainer(model=WithLoss(), args=arguments, train_dataset=data, callbacks=[Marks()]).train()


def measure(name: str, folder: Path, number: int) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds from the command to each mark of one measurement."""
    marks = folder / f"{name}-{number}.jsonl"
    me = [str(Path(__file__).resolve()), "--child", name, str(folder)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)] if name == "hf_trainer" else []
    here = {TELL: str(marks), "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.time(), busy_s()
    with open(folder / f"{name}-{number}.log", "w", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, *launcher, *me], env=environment | here, stdout=log, stderr=log)
    end = time.time(), busy_s()
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}: {Path(log.name).read_text()[-3000:]}")
    found = {BEGIN: (0.0, 0.0)}
    for what, at_s, cpu_s in map(json.loads, marks.read_text(encoding="utf-8").splitlines()):
        found.setdefault(what, (at_s - begin[0], cpu_s - begin[1]))
    return found | {"prompt": (end[0] - begin[0], end[1] - begin[1])}


def prepare(folder: Path) -> None:
    """Seal the recipe's dataset, and write as many rows for the peers."""
    import torch

    words = ["train", "--recipe", "tiny", "--run.root", str(folder / "runs"), "--dry-run"]
    subprocess.run([sys.executable, "-m", "springtide.cli.main", *words], check=True, stdout=subprocess.DEVNULL)
    torch.save(torch.randint(0, 256, (96, 65)), folder / "rows.pt")


def medians(found: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """The median of the seconds, and of the CPU seconds, to each mark."""
    return {
        what: (
            statistics.median(one[what][0] for one in found),
            statistics.median(one[what][1] for one in found),
        )
        for what in found[0]
    }


def main() -> None:
    """Measure all, and print the table."""
    options = claims.options(__doc__, 5)
    with tempfile.TemporaryDirectory(prefix="springtide-startup-") as name:
        folder = Path(name)
        prepare(folder)
        found: dict[str, list[dict[str, tuple[float, float]]]] = {one: [] for one in CONTENDERS}
        for number in range(int(options.rounds) + (not options.quick)):
            for one in CONTENDERS[number % 4 :] + CONTENDERS[: number % 4]:
                times = measure(one, folder, number)
                print(number, one, {what: round(at[0], 2) for what, at in times.items()}, file=sys.stderr, flush=True)
                if number or options.quick:
                    found[one].append(times)
    usual = {one: medians(found[one]) for one in CONTENDERS}
    print(f"{'':12}{'to step 0':>18}{'first step':>12}{'last step to prompt':>22}   [s, CPU s]")
    for one, at in usual.items():
        (start, start_cpu), (first, _), (last, last_cpu), (end, end_cpu) = (at[phase] for phase in PHASES)
        print(f"{one:12}{start:10.2f}{start_cpu:8.2f}{first - start:12.2f}{end - last:14.2f}{end_cpu - last_cpu:8.2f}")
    print("\nphases of springtide [s, CPU s]")
    ordered = sorted(usual["springtide"].items(), key=lambda one: one[1])
    for (before, (from_s, from_cpu)), (what, (at_s, at_cpu)) in itertools.pairwise(ordered):
        print(f"  {before:>22} -> {what:22}{at_s - from_s:8.2f}{at_cpu - from_cpu:8.2f}")
    ours, least = usual["springtide"], usual["floor"]
    ratio, end_s = ours["step 0"][0] / least["step 0"][0], ours["prompt"][0] - ours["last step"][0]
    detail = {one: {what: [round(n, 2) for n in pair] for what, pair in at.items()} for one, at in usual.items()}
    claims.show(
        options,
        [
            claims.claim("startup_vs_floor", ratio, GOALS["startup_vs_floor"], "lower", detail),
            claims.claim("end_s", end_s, GOALS["end_s"], "lower", {}),
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        globals()[sys.argv[2]](Path(sys.argv[3]))
    else:
        main()
