"""``make gpu`` on a machine without a GPU: every stage ends, and what it cannot do is said; what is measured is not measured
again, and a cell that fails, hangs or kills its process spoils no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"
STAGES = {"smoke", "speed", "groups", "kernels", "save", "memory", "lanes"}


def run(out: Path, *flags: str, status: int = 0) -> tuple[str, dict[str, Any]]:
    """What ``python benchmarks/gpu`` prints, and its line of JSON."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(GPU), "--quick", "--json", "--out", str(out), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_every_stage_ends_without_a_gpu_and_says_what_it_skipped(tmp_path: Path) -> None:
    text, found = run(tmp_path)
    assert found["quick"]
    assert found["stages"].keys() == STAGES
    for name, stage in found["stages"].items():
        assert stage["finished"], name
        assert stage["measured"], name
        assert stage["skipped"], name
        for why in stage["skipped"].values():
            assert "GPU" in why or "no fp8" in why, (name, why)
    for claim in found["claims"]:
        assert claim.keys() == {"name", "value", "goal", "better", "holds", "detail"}
        assert claim["holds"] == (
            claim["value"] >= claim["goal"] if claim["better"] == "higher" else claim["value"] <= claim["goal"]
        )
    holds = {claim["name"]: claim["holds"] for claim in found["claims"]}
    for name in ("loss_falls_by_nats", "steps_left_out", "compiled_after_first_group", "two_workers_bit_equal_to_one"):
        assert holds[name], name
    assert {path.name for path in tmp_path.iterdir()} == {*(f"{name}.json" for name in STAGES), "tables.md"}
    assert "| two workers against one | bit_equal |" in (tmp_path / "tables.md").read_text()

    before = (tmp_path / "groups.json").read_text()
    text, _ = run(tmp_path, "--only", "groups")
    assert "groups: left out: it finished" in text
    assert (tmp_path / "groups.json").read_text() == before


def test_a_stage_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(GPU), "--only", "sped"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no stage sped: there are smoke, speed" in done.stderr


STAGE = """
import os, sys
sys.path[:0] = [{benchmarks!r}, {gpu!r}]
from pathlib import Path
from measure import Book, NotHere
def fails():
    raise ValueError("not this one")
def is_not_here():
    raise NotHere("needs another card")
def dies():
    os._exit(9)
def counts():
    print("measured")
    return {{"s": 1.0}}
Book("none", Path(sys.argv[1]), True, 0.0).cell("a/first", counts)
book = Book("stage", Path(sys.argv[1]), True, 60.0)
book.cell("a/first", counts)
book.cell("a/fails", fails)
book.cell("a/skipped", is_not_here)
if "die" in sys.argv:
    book.cell("a/dies", dies)
book.cell("a/last", counts)
sys.exit(book.end([]))
"""


def test_cells_are_kept_and_one_that_spoils_its_process_is_tried_twice(tmp_path: Path) -> None:
    program = STAGE.format(benchmarks=str(GPU.parent), gpu=str(GPU))

    def stage(*flags: str) -> tuple[int, int, dict[str, Any]]:
        command = [sys.executable, "-c", program, str(tmp_path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        told = json.loads((tmp_path / "stage.json").read_text())
        return done.returncode, done.stdout.splitlines().count("measured"), told["cells"]

    status, measured, cells = stage("die")
    assert (status, measured) == (9, 1)
    assert json.loads((tmp_path / "none.json").read_text())["cells"]["a/first"]["status"] == "left out"
    assert cells["a/fails"]["why"] == "ValueError: not this one"
    assert cells["a/skipped"] == cells["a/skipped"] | {"status": "skipped", "why": "needs another card"}
    status, measured, _ = stage("die")
    assert (status, measured) == (9, 0)  # the first is kept; the one that died is tried once more
    status, measured, cells = stage("die")  # and then no more
    assert (status, measured) == (1, 1)
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "a/first": "measured",
        "a/fails": "failed",
        "a/skipped": "skipped",
        "a/dies": "failed",
        "a/last": "measured",
    }
