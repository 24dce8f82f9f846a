"""Whatever happens in a save, the run goes on from a good step by itself, and nothing that was committed is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saving import apart, resume, save_with_a_fault

from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.layout import committed
from springtide.store import Folder

pytestmark = pytest.mark.distributed
TABLE: list[tuple[str, str, int, int]] = []
"""fault, result, step resumed, bytes lost"""


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """What the sweep found, printed at its end (pytest -rP or -s shows it)."""
    yield
    for fault, result, step, lost in TABLE:
        print(f"{fault:90s} {result:34s} step {step:3d}  bytes lost {lost}")


def recover(url: str, fault: str, result: str) -> dict[str, Any]:
    """Resume; what was committed before must still be whole, and what is resumed the newest of it."""
    before = committed(Folder(url))
    found: dict[str, Any] = apart(resume, url)
    after = inspect(Folder(url), verify=True)
    whole = {one.name for one in after if one.state == "committed"}
    lost = sum(
        one.manifest.size_bytes for one in after if one.manifest and one.name in before and one.name not in whole
    )
    TABLE.append((fault, result, found["step"], lost))
    assert set(before) <= whole
    assert not found["rejected"]
    assert found["step"] == (int(before[-1].removeprefix("step-")) if before else 0)
    return found


def sweep(root: str, told: Path, where: str, points: int) -> None:
    """Kill at ``points`` places spread over a save."""
    assert [outcome.error for outcome in apart(save_with_a_fault, f"{root}/whole", where, 0, str(told))] == [None, None]
    calls = int(told.read_text())
    assert calls >= points
    died = set()
    for point in range(points):
        nth = 1 + point * (calls - 1) // (points - 1)
        url = f"{root}/{where}-{nth}"
        outcomes = apart(save_with_a_fault, url, where, nth, str(told))
        died.add(told.read_text())
        if where == "writer":
            assert outcomes[0].error is None
            assert "ended with status -9" in str(outcomes[1].error) or outcomes[1].written
        else:
            assert outcomes is None
        found = recover(url, f"{where} killed at {told.read_text()} ({nth}/{calls})", "resumed by itself")
        assert found["step"] in (5, 10)
    assert len(died) > points // 2  # places, not one place again and again


def test_the_writing_process_killed_anywhere(tmp_path: Path) -> None:
    sweep(str(tmp_path), tmp_path / "told", "writer", 16)


def test_the_trainer_killed_anywhere(tmp_path: Path) -> None:
    sweep(str(tmp_path), tmp_path / "told", "trainer", 8)


def test_the_writing_process_killed_anywhere_on_object_storage(s3: str, tmp_path: Path) -> None:
    sweep(f"{s3}/faults", tmp_path / "told", "writer", 10)
