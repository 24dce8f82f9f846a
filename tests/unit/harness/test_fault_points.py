"""A fault point reports and waits when a drill has armed it, and is nothing otherwise; and the table names those that exist."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from fault_points.watch import Reached, watch

import springtide
from springtide import faults
from springtide.faults import POINTS, When, fault_point

PACKAGE = Path(springtide.__file__).parent


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def test_a_point_is_nothing_unless_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket", lambda *_: pytest.fail("it opened a connection"))
    assert faults.armed() == ""
    fault_point("restore", "before")


@pytest.mark.processes
def test_a_process_waits_at_a_point_until_the_drill_lets_it_go_on() -> None:
    came, go = threading.Event(), threading.Event()
    seen = list[Reached]()

    def on_reached(reached: Reached) -> None:
        seen.append(reached)
        came.set()
        go.wait()

    with watch(on_reached):
        program = (
            "import sys; from springtide.faults import arm, fault_point\n"
            "arm(sys.argv[1]); fault_point('claim', 'after'); print(1)"
        )
        command = [sys.executable, "-c", program, faults.armed()]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert came.wait(60)
        assert process.poll() is None
        go.set()
        assert process.communicate(timeout=60)[0] == b"1\n"
    assert seen == [Reached("claim", "after", process.pid)]
    assert seen[0].name == "claim-after"
    assert faults.armed() == ""


def test_a_process_goes_on_when_the_drill_is_over(tmp_path: Path) -> None:
    faults.arm(str(tmp_path / "nobody-listens"))
    fault_point("commit", "before")


def test_the_armed_address_is_what_this_process_hands_on() -> None:
    with watch(lambda reached: None):
        assert os.path.exists(faults.armed())


def test_every_point_of_the_table_is_in_the_code_once_and_no_other() -> None:
    """``test_second_loss`` shows that a run passes them."""
    found = Counter[tuple[str, str]]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "fault_point":
                point, when = (ast.literal_eval(argument) for argument in node.args)
                found[point, when] += 1
    assert found == Counter((point, when) for point in POINTS for when in get_args(When))
