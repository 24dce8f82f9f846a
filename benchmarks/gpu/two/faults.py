"""Two nodes or more with GPUs: what the loss of a worker, a node or a GPU's speed costs under NCCL.

NOT RUN YET by anybody of this project. A run of llama3_8b trains on a Ray cluster; a person does one thing after the other to
it, as this program asks, and it tells from the journal what each cost:

    notice     `springtide notice --in 60` on one node          expected: no step lost, the others' processes kept
    worker     `kill -9` of one RayTrainWorker                   expected today: every survivor is a new process, 60-150 s
    node       power off a node                                  the same; state from the memory of the others
    slow       `nvidia-smi -i 3 -pl 300` on one node             expected: the comparison of devices names that node

After each: the time between the last step before and the first after, steps trained twice, and what else the run told. At the
end `springtide verify` proves that no sample was lost or seen twice.

    springtide train --config CONFIG --run.id faults --elastic.max-workers 16 --run.root SHARED    in another terminal; then
    python benchmarks/gpu/two/faults.py SHARED/faults
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "platform"))

from springtide.events import Event, Started, StepDone
from springtide.store import Folder
from springtide.track.journal import read_journal

SCENES = {
    "notice": "run `springtide notice --in 60` on one node",
    "worker": "run `kill -9` on one process called RayTrainWorker",
    "node": "power off one node (not the head)",
    "slow": "run `nvidia-smi -i 3 -pl 300` on one node; set it back afterwards",
}
LOOK_S, STEPS_AFTER, MOST_S = 2.0, 10, 1800.0


def main() -> None:
    """Scene by scene."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run's folder, as this machine sees it")
    parser.add_argument("--only", default=",".join(SCENES))
    options = parser.parse_args()
    run = Folder(options.run)
    for scene in options.only.split(","):
        before = read_journal(run)
        input(f"{scene}: {SCENES[scene]}, then press Enter. ")
        tell(scene, len(before), wait(run, before))
    subprocess.run(["springtide", "report", options.run], check=False)
    subprocess.run(["springtide", "verify", options.run], check=False)


def wait(run: Folder, before: list[Event]) -> list[Event]:
    """The events, once a group of workers after ``before`` has trained some steps, or steps went on without a new one."""
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline:
        events = read_journal(run)
        new = events[len(before) :]
        starts = [index for index, event in enumerate(new) if isinstance(event, Started)]
        since = new[starts[-1] :] if starts else new
        if sum(isinstance(event, StepDone) for event in since) >= STEPS_AFTER * (1 if starts else 3):
            return events
        time.sleep(LOOK_S)
    return read_journal(run)


def tell(scene: str, seen: int, events: list[Event]) -> None:
    """What the journal says of it."""
    new = events[seen:]
    steps = [event for event in new if isinstance(event, StepDone)]
    twice = len(steps) - len({event.step for event in steps})
    for event in new:
        if isinstance(event, Started):
            print(f"{scene}: {event.world_size} workers from step {event.step}, phases {event.phases_s}", flush=True)
    gaps = [after.time_s - before.time_s for before, after in itertools.pairwise(steps)]
    if gaps:
        print(f"{scene}: longest time between two steps {max(gaps):.1f} s, {twice} steps trained twice", flush=True)
    others = sorted({event.kind for event in new if not isinstance(event, StepDone | Started)})
    print(f"{scene}: also told: {', '.join(others) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
