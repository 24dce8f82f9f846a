"""``make flaky``: which tests of real processes fail now and then, found by running them ten times on busy cores.

Each core also has a busy process at nice 5, which takes about a quarter of it from a test. As a neighbour on the machine
would, it delays every process at moments of its own; and ten rounds still end in a night. No test has a second try, and no
failure stops a round. A round writes its result down when it ends, below ``.flaky/`` and the name of the commit; called again
for the same commit this goes on after the last round that ended. Ctrl-C ends all that it started.

    python tests/flaky.py [--rounds 10] [--nice 5] [--limit 7200: of a round, s] [-- TESTS OR OPTIONS OF PYTEST]
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


def run(name: str, options: list[str], folder: Path, limit_s: float) -> dict[str, str]:
    """Run pytest once, for at most so long; test -> passed, failed or skipped. What failed has its output in ``folder``."""
    report = folder / f"{name}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "processes",
        "--force-reruns",
        "0",
        f"--junit-xml={report}",
        *options,
    ]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {f"({name}: not at its end after {limit_s:.0f} s)": "failed"}
        finally:
            end(process)
    if not report.exists():
        return {f"({name}: pytest ended with {status})": "failed"}
    return read(report, folder)


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
    parser.add_argument("--nice", type=int, default=5)
    parser.add_argument("--limit", type=float, default=7200.0)
    parser.add_argument("--results", type=Path, default=REPOSITORY / ".flaky")
    parser.add_argument("options", nargs="*", help="tests or options of pytest, instead of all tests of real processes")
    options = parser.parse_args()
    parts = {"tests": options.options} if options.options else PARTS
    of = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8] if options.options else "all"
    results = options.results / f"{commit()}-{of}"
    for one in (signal.SIGTERM, signal.SIGINT):  # a shell that starts this in the background has SIGINT ignored
        signal.signal(one, signal.default_int_handler)
    rounds: list[dict[str, str]] = []
    try:
        for number in range(1, options.rounds + 1):
            folder = results / f"round-{number:02d}"
            result = folder / "result.json"
            if not result.exists():
                folder.mkdir(parents=True, exist_ok=True)
                begin, found = time.monotonic(), dict[str, str]()
                with busy_cores(options.nice):
                    for name, how in parts.items():
                        found |= run(name, how, folder, max(1.0, options.limit - (time.monotonic() - begin)))
                result.write_text(json.dumps(found, indent=1))
                took = (time.monotonic() - begin) / 60
                failed = list(found.values()).count("failed")
                print(f"round {number}: {failed} of {len(found)} tests failed, {took:.0f} min, {folder}", flush=True)
            rounds.append(json.loads(result.read_text()))
    except KeyboardInterrupt:
        print(f"stopped in round {len(rounds) + 1}: the next call goes on there", file=sys.stderr)
        show(rounds)
        sys.exit(130)
    sys.exit(bool(show(rounds)))


if __name__ == "__main__":
    main()
