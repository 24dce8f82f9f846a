"""A run whose disk is filled by another program while it trains, and emptied again some steps later. Prints one line of JSON.

python disk_full.py DISK CONFIG GATE

DISK is a small file system of its own, and the run's root; GATE lies elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ranks import meeting_place

import springtide as st
from springtide import config as configs
from springtide.events import SaveFailed
from springtide.tracking.journal import read_journal

FULL_FROM, FULL_TO = 6, 12
"""The disk is full after the first of these steps and until the second."""
_PATIENCE_S = 240.0
_GATED = Path(__file__).with_name("gated.py")


def fill(disk: Path) -> Path:
    """Write a file until the disk is full; return it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65_536, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass
    return ballast


def main(disk: Path, config_file: Path, gate: Path) -> None:
    """Run it."""
    store, where = meeting_place()
    config = configs.load_config(config_file)

    def let_pass(steps: int) -> None:
        temporary = gate.with_suffix(".new")
        temporary.write_text(str(steps))
        temporary.replace(gate)

    log = gate.with_suffix(".log")
    environment = {**os.environ, **where, "RANK": "0", "WORLD_SIZE": "1"}
    let_pass(FULL_FROM)
    command = [sys.executable, str(_GATED), str(gate), "--config", str(config_file)]
    with log.open("wb") as output:
        trainer = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"{config.run.root}/{config.run.id}"

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert trainer.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)  # between looks

    def waits(step: int) -> bool:
        file = gate.with_suffix(".waits")
        return file.exists() and file.read_text() == str(step)

    try:
        wait_for(lambda: waits(FULL_FROM + 1) and len(st.open_run(url).checkpoints) == 2)
        ballast, full_s = fill(disk), time.time()
        let_pass(FULL_TO)
        wait_for(lambda: waits(FULL_TO + 1) and "THE SAVE FAILED" in log.read_text())
        emptied_s = time.time()
        ballast.unlink()
        let_pass(config.num_steps)
        status = trainer.wait(_PATIENCE_S)
    finally:
        trainer.kill()
        trainer.wait()
        del store
    found, verified = st.open_run(url), st.open_run(url).verify()
    events = read_journal(found.folder)
    left = [path.name for path in Path(url).rglob("*") if path.name.startswith(".tmp-")]
    print(
        json.dumps(
            {
                "status": status,
                "finished": found.finished,
                "steps": [one.step for one in events if one.kind == "step"],
                "steps_meanwhile": [one.step for one in found.steps if full_s < one.time_s < emptied_s],
                "failed": [one.reason for one in events if isinstance(one, SaveFailed)],
                "checkpoints": found.checkpoints,
                "verified": verified.ok,
                "missing": verified.missing,
                "left": left,
                "said": log.read_text().splitlines(),
            }
        )
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
