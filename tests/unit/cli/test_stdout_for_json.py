"""What a command prints with --json is one object, whoever else writes to the same output."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from springtide.cli.output import stdout_for_json

pytestmark = pytest.mark.processes

NOISY = """
import atexit, os, subprocess, sys, threading
from springtide.cli.output import stdout_for_json

print("before", file=sys.stderr)
with stdout_for_json() as answer:
    print("(raylet) a warning")
    os.write(1, b"a library in C\\n")
    subprocess.run(["echo", "a child process"], check=True)
    answer({"ok": True})
late = threading.Thread(target=lambda: print("(raylet) a late thread"))
late.start()
late.join()
atexit.register(lambda: print("the very end"))
"""


def test_one_object_is_all_that_a_noisy_process_prints() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ok": True}
    said = [
        "before",
        "(raylet) a warning",
        "a library in C",
        "a child process",
        "(raylet) a late thread",
        "the very end",
    ]
    assert sorted(done.stderr.splitlines()) == sorted(said)


def test_who_replaced_the_output_gets_the_object_and_its_output_back(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_for_json() as answer:
        print("(raylet) a warning")
        answer([1, 2])
    print("after")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "after"
    assert json.loads(printed.out.removesuffix("after\n")) == [1, 2]
    assert printed.err == "(raylet) a warning\n"
