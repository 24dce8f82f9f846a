"""Without Ray a process that says nothing for too long ends itself, and says where it was."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.processes

_HANGS = """
import importlib, time
from springtide.events import Started, StepDone
entry = importlib.import_module("springtide.training.__main__")
figures = ("loss", "grad_norm", "learning_rate", "tokens", "step_tokens", "data_wait_s", "tokens_per_s", "mfu")

def waits_for_a_peer(least_s, for_s):
    watch = entry.HangWatchdog(num_steps=100, least_s=least_s)
    watch(Started(step=0, world_size=1))
    watch(StepDone(step=1, step_time_s=0.01, memory_bytes=1, world_size=1, digest="", **dict.fromkeys(figures, 1)))
    print("waits", flush=True)
    time.sleep(for_s)
    watch.close()

waits_for_a_peer(0, 0.2)
waits_for_a_peer(3, 0)
time.sleep(3.2)  # past the end of the watch that was closed; a busy core may hold up its closing for a second
waits_for_a_peer(0.3, 100)
"""


def test_a_process_that_hangs_after_a_step_ends_with_its_stacks() -> None:
    """One that may wait for ever, or has ended, is left in peace."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert done.stdout == "waits\nwaits\nwaits\n", done.stderr[-2000:]
    assert "in waits_for_a_peer" in done.stderr
    assert time.monotonic() - begin < 90
