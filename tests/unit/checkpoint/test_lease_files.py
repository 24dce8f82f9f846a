"""Lease files that are damaged, or that another version wrote: no run ends needlessly, and no writer is missed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from springtide.checkpoint import leases
from springtide.errors import DamagedFile, RunExists
from springtide.storage import Folder

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    """A run that a driver and its worker group held, on another machine."""
    folder = Folder(tmp_path)
    leases.claim(folder, "driver", trains=False)
    leases.claim(folder, "driver", again=True)
    for number in (1, 2):
        change(folder, number, lambda lease: lease | {"host": "elsewhere"})
    return folder


def change(run: Folder, number: int, how: Change) -> None:
    """Have a lease's file say something else."""
    folder, name = run / "leases", f"{number:04d}.json"
    found = how(folder.read_json(name))
    folder.write(name, found if isinstance(found, bytes) else json.dumps(found))


DAMAGES: list[Change] = [
    lambda lease: lease | {"unknown": 1},
    lambda lease: {key: value for key, value in lease.items() if key != "owner"},
    lambda lease: lease | {"owner": None},
    lambda lease: lease | {"pid": 10**30},
    lambda lease: lease | {"begun_s": float("nan")},
    lambda lease: lease | {"begun_s": 1e300},
    lambda lease: lease | {"term": 7},
    lambda lease: lease | {"driver": 9},
    lambda lease: lease | {"format": "one"},
    lambda lease: [lease],
    lambda lease: b"",
    lambda lease: bytes(200),
    lambda lease: b"[" * 100_000,
    lambda lease: b"\xff",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_lease_counts_as_lost_and_is_named(
    run: Folder, caplog: pytest.LogCaptureFixture, damage: Change
) -> None:
    change(run, 2, damage)
    with pytest.raises(DamagedFile, match=r"leases/0002\.json: .*(restore|remove)"):
        leases.newest(run)
    leases.check_free(run)
    leases.check(run, 2)
    with pytest.raises(RunExists, match=r"held .*0002\.json"):
        leases.claim(run, "driver", again=True)  # who has claimed it is not known
    assert leases.claim(run, "next", trains=False).term == 3
    assert leases.losses(run) == 1
    assert leases.has_trained(run, 3)
    with pytest.raises(RunExists, match=r"lease 2 .*lease 3"):
        leases.check(run, 2)
    assert all("0002.json" in record.getMessage() for record in caplog.records)


def test_a_driver_with_a_damaged_lease_counts_as_lost(run: Folder) -> None:
    change(run, 1, lambda lease: b"{}")
    assert leases.claim(run, "next").term == 3


def test_a_lease_of_another_format_is_refused_by_number(run: Folder) -> None:
    assert (run / "leases").read_json("0002.json")["format"] == leases.FORMAT == 1
    change(run, 2, lambda lease: lease | {"format": 2, "new": True})
    for claim in (lambda: leases.claim(run, "next"), lambda: leases.check_free(run), lambda: leases.newest(run)):
        with pytest.raises(RunExists, match=r"lease 2 .*format 2.*reads 1"):
            claim()
    leases.check(run, 2)
    with pytest.raises(RunExists, match=r"lease 2 .*format 2"):
        leases.check(run, 1)
    assert (run / "leases").names() == ["0001.json", "0002.json"]


def test_a_lease_from_before_the_number_is_of_the_first_format(run: Folder) -> None:
    change(run, 2, lambda lease: {key: value for key, value in lease.items() if key != "format"})
    assert leases.newest(run) is not None
    assert leases.claim(run, "next").term == 3
