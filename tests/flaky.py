"""``make long SUBJECT=repeated``: find tests of real processes that fail now and then, by ten rounds on busy cores.

Both parts of ``make test`` run at once: each is the other's load, three tests on two cores, which delays every process at
moments of its own. When one part has ended, busy processes at nice 5 take its place. No test has a second try, and no failure
stops a round. A part writes its result when it ends, below ``.long/`` and the name of the commit; called again for the
same commit this runs the parts that are missing. Ctrl-C ends all that it started.

    python tests/flaky.py [--rounds 10 | --round N] [--nice 5] [--limit 7200: of a round, s] [-- TESTS OR OPTIONS OF PYTEST]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]
PARTS = {"gloo": ["-n", "2", "tests/distributed", "tests/benchmarks"], "ray": ["tests/elastic"]}
"""As in ``make test``."""
GRACE_S = 30.0
BUSY = "import os\nwhile os.getppid() == {parent}:\n    sum(range(10_000_000))"
"""Until whoever started it is gone, in whatever way."""


def commit() -> str:
    """The commit, and what has changed since."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    name, changed = git("rev-parse", "--short=12", "HEAD").strip(), git("diff", "HEAD")
    return f"{name}-{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else name


@contextlib.contextmanager
def busy_cores(nice: int) -> Iterator[None]:
    """A busy process for each core."""
    program = f"import os\nos.nice({nice})\n{BUSY.format(parent=os.getpid())}"
    load = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Let pytest end as with Ctrl-C, then kill it and all that it has started."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    process.wait()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def start(name: str, options: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start pytest for one part; what it prints goes to ``folder``."""
    pytest = [sys.executable, "-m", "pytest", "-m", "processes", "--force-reruns", "0"]
    with (folder / f"{name}.log").open("wb") as log:
        command = [*pytest, f"--junit-xml={folder / name}.xml", *options]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)


def outcomes(name: str, status: int | None, folder: Path, limit_s: float) -> dict[str, str]:
    """Test -> passed, failed or skipped, of a part that has ended. What failed has its output in ``folder``."""
    report = folder / f"{name}.xml"
    if status is None:
        return {f"({name}: not at its end after {limit_s:.0f} s)": "failed"}
    return read(report, folder) if report.exists() else {f"({name}: pytest ended with {status})": "failed"}


def play(parts: dict[str, list[str]], folder: Path, nice: int, limit_s: float) -> dict[str, str]:
    """Run the parts of a round that have no result yet, at once; test -> outcome, over all parts."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: how for name, how in parts.items() if not (folder / f"{name}.json").exists()}
    begin = time.monotonic()
    running = {name: start(name, how, folder) for name, how in missing.items()}
    try:
        with contextlib.ExitStack() as load:
            is_alone = False
            while running:
                if len(running) == 1 and not is_alone:
                    is_alone = True
                    load.enter_context(busy_cores(nice))
                time.sleep(1.0)  # between looks; a part takes half an hour
                for name, process in list(running.items()):
                    if process.poll() is None and time.monotonic() - begin < limit_s:
                        continue
                    status = process.poll()
                    end(running.pop(name))
                    found = outcomes(name, status, folder, limit_s)
                    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    finally:
        for process in running.values():
            end(process)
    return {test: how for name in parts for test, how in json.loads((folder / f"{name}.json").read_text()).items()}


def read(report: Path, folder: Path) -> dict[str, str]:
    """What a report in the form of JUnit says."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        failures = [*case.findall("failure"), *case.findall("error")]
        found[test] = "failed" if failures else "skipped" if case.find("skipped") is not None else "passed"
        if failures:
            file = "".join(letter if letter.isalnum() else "-" for letter in test)[:150]
            (folder / f"{file}.txt").write_text("\n\n".join(one.text or "" for one in failures))
    return found


def show(rounds: list[dict[str, str]]) -> int:
    """The table; how many tests failed at least once."""
    runs = Counter(test for found in rounds for test, outcome in found.items() if outcome != "skipped")
    failures = Counter(test for found in rounds for test, outcome in found.items() if outcome == "failed")
    print(f"\n{'runs':>5} {'failures':>8}  test")
    for test in sorted(runs, key=lambda test: (-failures[test], test)):
        print(f"{runs[test]:5d} {failures[test]:8d}  {test}")
    print(f"{len(failures)} of {len(runs)} tests failed at least once in {len(rounds)} rounds")
    return len(failures)


def main() -> None:
    """Run what is missing, and show all there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--round", type=int, help="run this round alone")
    parser.add_argument("--nice", type=int, default=5)
    parser.add_argument("--limit", type=float, default=7200.0)
    parser.add_argument("--results", type=Path, default=REPOSITORY / ".long")
    parser.add_argument("options", nargs="*", help="tests or options of pytest, instead of all tests of real processes")
    options = parser.parse_args()
    parts = {"tests": options.options} if options.options else PARTS
    of = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8] if options.options else "all"
    results = options.results / f"{commit()}-{of}"
    for one in (signal.SIGTERM, signal.SIGINT):  # a shell that starts this in the background has SIGINT ignored
        signal.signal(one, signal.default_int_handler)
    rounds: list[dict[str, str]] = []
    try:
        for number in [options.round] if options.round else range(1, options.rounds + 1):
            folder, begin = results / f"round-{number:02d}", time.monotonic()
            found = play(parts, folder, options.nice, options.limit)
            failed, took = list(found.values()).count("failed"), (time.monotonic() - begin) / 60
            print(f"round {number}: {failed} of {len(found)} tests failed, {took:.0f} min, {folder}", flush=True)
            rounds.append(found)
    except KeyboardInterrupt:
        print(f"stopped after {len(rounds)} rounds: the next call resumes there", file=sys.stderr)
        show(rounds)
        sys.exit(130)
    sys.exit(bool(show(rounds)))


if __name__ == "__main__":
    main()
