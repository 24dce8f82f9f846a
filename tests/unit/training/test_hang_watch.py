"""Without Ray a process that says nothing for too long ends itself, and says where it was."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.processes

_HANGS = """
import importlib, sys, time
from springtide.events import Started, StepDone
entry = importlib.import_module("springtide.training.__main__")
watch = entry.HangWatchdog(num_steps=100, least_s=float(sys.argv[1]))
watch(Started(step=0, world_size=1))
figures = ("loss", "grad_norm", "learning_rate", "tokens", "step_tokens", "data_wait_s", "tokens_per_s", "mfu")
watch(StepDone(step=1, step_time_s=0.01, memory_bytes=1, world_size=1, digest="", **dict.fromkeys(figures, 1)))
print("waits", flush=True)

def waits_for_a_peer():
    time.sleep(float(sys.argv[2]))

waits_for_a_peer()
watch.close()
time.sleep(float(sys.argv[2]))
print("ended", flush=True)
"""


def test_a_process_that_hangs_after_a_step_ends_with_its_stacks() -> None:
    begin = time.monotonic()
    command = [sys.executable, "-c", _HANGS, "0.3", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert done.stdout == "waits\n"
    assert "in waits_for_a_peer" in done.stderr
    assert time.monotonic() - begin < 90


def test_one_that_waits_for_ever_or_has_ended_is_left_in_peace() -> None:
    command = [sys.executable, "-c", _HANGS, "0", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (0, "waits\nended\n"), done.stderr[-2000:]
