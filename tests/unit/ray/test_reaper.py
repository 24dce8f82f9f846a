"""What is left of a private cluster ends with its driver, and nobody else's process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from springtide.ray.cluster import reaper

pytestmark = pytest.mark.processes

WAITS = "import signal, sys; print('up', flush=True); signal.pause()"


def started(*command: str, **how: object) -> subprocess.Popen[bytes]:
    """Start a process and wait until it runs."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **how)  # type: ignore[call-overload]
    assert process.stdout.readline()
    return process  # type: ignore[no-any-return]


def test_a_process_of_the_cluster_ends_and_a_user_who_reads_its_log_does_not(tmp_path: Path) -> None:
    folder, log = tmp_path / "springtide-ray-1", tmp_path / "springtide-ray-1" / "raylet.log"
    folder.mkdir()
    log.write_text("a line\n")
    ours = {**os.environ, reaper.MARK: str(folder)}
    with log.open() as read:
        mine = [
            started(sys.executable, "-c", WAITS, str(log), env=ours),
            started(sys.executable, "-c", WAITS, env=ours, stdin=read),
            # Ray's workers write their titles over their command line and their variables
            started("ray::IDLE", "-c", WAITS, executable=sys.executable, env={"PATH": os.defpath}, stdin=read),
        ]
        others = [
            started("tail", "-f", str(log)),
            started(sys.executable, "-c", WAITS, env={**os.environ, reaper.MARK: f"{folder}0"}, stdin=read),
            started(sys.executable, "-c", WAITS, env=ours),  # a program of the user's, started by the driver
        ]
    try:
        subprocess.run([sys.executable, "-I", reaper.__file__, str(folder)], stdin=subprocess.DEVNULL, check=True)
        assert [one.wait() for one in mine] == [-9, -9, -9]
        assert [one.poll() for one in others] == [None, None, None]
        assert not folder.exists()
    finally:
        for one in mine + others:
            one.kill()
            one.communicate()
