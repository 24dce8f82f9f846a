"""A run with five faults, and what is told of them: ``python tests/programs/five_faults.py``, five minutes; ends with one JSON
object, and status 1 if something is not as it should be.

    a notice, a node killed, a node that joins; a worker process killed; a worker that hangs; the driver interrupted and resumed
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from springtide.api.prepare import prepare
from springtide.api.train import train
from springtide.events import Decided, Event, Failed, Left, Started, StepDone, Stopped
from springtide.planning.scenarios import Act, Scenario, Stage, config_of
from springtide.ray.cluster.local import LocalCluster, kill_worker
from springtide.run.compare import compare_runs
from springtide.run.folder import Run

ACTS = (Act(20, "drain", workers=3), Act(60, "kill", workers=2), Act(80, "add"), Act(180, "hang", workers=2))
KILLED_AT, STOPPED_AT, STEPS = 240, 280, 400
CAUSES = ("notice", "lost nodes", "grow", "hung", "failed workers", "the driver was started again")
EXACT = 0.001
"""How far the ledger may be from the time that was held."""


def held(events: list[Event]) -> float:
    """Worker-seconds by the events alone: the time to each event, times the workers of the group that is there, or of the next
    one; between drivers none."""
    events = sorted(events, key=lambda one: (one.term, one.time_s))
    total, here, sizes = 0.0, 0, [one.world_size for one in events if isinstance(one, Started)]
    waiting = 0.0
    for before, event in itertools.pairwise(events):
        passed_s = max(0.0, event.time_s - before.time_s)
        if isinstance(before, Stopped):  # no driver
            passed_s = 0.0
        if here:
            total += passed_s * here
        else:
            waiting += passed_s
        if isinstance(event, Started):
            here = sizes.pop(0)
            total, waiting = total + waiting * here, 0.0
        elif isinstance(event, Left | Failed | Stopped) or (isinstance(event, Decided) and event.decision == "replace"):
            here = 0
    return total


def history(run: Run, uri: str) -> list[int]:
    """The steps of the loss in MLflow, in the order of the server."""
    from mlflow import MlflowClient

    id = run.folder.read_json("mlflow.json")["run_id"]
    return [one.step for one in MlflowClient(uri).get_metric_history(id, "train/loss")]


def main() -> None:
    """Train the twin and the run, and compare."""
    scenario = Scenario(3, ACTS, STEPS, "five faults")
    with tempfile.TemporaryDirectory(prefix="five-faults-") as root:
        uri = f"sqlite:///{root}/mlflow.db"
        changes = {"track.mlflow_uri": uri, "track.price": 3.6, "checkpoint.every_steps": 50}
        config = prepare(config_of(scenario, root).override(changes))
        with LocalCluster(scenario.workers) as cluster:
            twin = train(config.override({"run.id": "twin", "elastic.max_workers": 1}))
            say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
            stage, left = Stage(cluster, scenario.acts, config.elastic.notice_file, say), {"kill", "stop"}

            def listen(event: Event) -> None:
                if not isinstance(event, StepDone):
                    return
                stage.reach(event.step, event.world_size)
                if event.step >= KILLED_AT and event.world_size == 2 and "kill" in left:
                    left.remove("kill")
                    say(f"step {event.step}: kill -9 {kill_worker()}")
                elif event.step >= STOPPED_AT and left == {"stop"}:
                    left.remove("stop")
                    say(f"step {event.step}: the driver is interrupted")
                    os.kill(os.getpid(), signal.SIGINT)

            faulty = config.override({"run.id": "faulty"})
            train(faulty, listen=listen)
            run = train(faulty, resume=True, listen=listen)
            stage.end()
        book, steps, same = run.ledger, history(run, uri), compare_runs(run, twin)
        found: dict[str, Any] = {
            "held_by_ledger": round(book.held, 2),
            "held_by_events": round(held(run.events), 2),
            "spent": {kind: round(value, 2) for kind, value in book.spent.items()},
            "dollars": round(book.total_dollars, 4),
            "kwh": book.total_kwh,
            "restarts": [(one.step, one.cause, one.steps_lost, round(one.gap_s, 2)) for one in book.restarts],
            "mlflow_steps": len(steps),
            "identical": same.identical,
        }
        causes = [one.cause for one in book.restarts]
        wrong = {
            "ledger against held time": abs(book.held - held(run.events)) > EXACT * book.held,
            "sum of kinds": abs(sum(book.spent.values()) - book.held) > EXACT * book.held,
            "acts not carried out": bool(stage.to_come or left),
            **{f"told: {cause}": not any(one.startswith(cause) for one in causes) for cause in CAUSES},
            "each with its cost": not all(one.gap_s > 0 for one in book.restarts),
            "MLflow's steps rise": any(one >= other for one, other in itertools.pairwise(steps)) or len(steps) < STEPS,
            "identical": not same.identical,
        }
        found["problems"] = [name for name, is_so in wrong.items() if is_so]
    print(json.dumps(found))
    sys.exit(bool(found["problems"]))


if __name__ == "__main__":
    main()
