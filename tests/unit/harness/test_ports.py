"""A port that one process reserves is given to no other, although nobody listens on it yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ports import reserve

pytestmark = pytest.mark.processes

FIRST = 21_900
"""Where no other process of the tests is when this one looks."""


def test_two_processes_get_other_ports_until_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ports._FIRST", FIRST)
    mine = reserve(3)
    assert len({*mine, *reserve(2)}) == 5
    program = f"import ports; ports._FIRST = {FIRST}; print(*ports.reserve(3), flush=True); input()"
    there = Path(__file__).parents[2] / "programs"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=there, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = [int(port) for port in other.stdout.readline().split()]
        assert len(theirs) == 3
        assert not {*mine, *theirs} & {*reserve(3)}
        assert not {*mine} & {*theirs}
        other.kill()
    assert theirs[0] in reserve(20)
