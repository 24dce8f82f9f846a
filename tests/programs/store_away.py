"""A run on Ray whose object store (a real S3 server) is killed while it trains and started again SECONDS later. Prints one line
of JSON; exits with 1 unless training went on, nothing is missing in the journal, and ``verify`` is content.

python store_away.py SECONDS
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import s3_server

import springtide as st
from springtide import config as configs
from springtide.errors import SpringtideError
from springtide.events import Failed, StepDone

_STEPS_BEFORE = 60
_PATIENCE_S = 300.0


def main(seconds: float) -> int:
    """Run it."""
    with tempfile.TemporaryDirectory(prefix="springtide-store-") as folder:
        (root := Path(folder) / "s3").mkdir()
        with s3_server.serve(root) as server:
            config = configs.recipes.tiny().override(
                {
                    "run.id": "away",
                    "run.root": "s3://checkpoints/runs",
                    "shards.root": f"{folder}/datasets",
                    "feed.cache": f"{folder}/cache",
                    "track.mlflow_uri": "off",
                    "parallel.threads": 1,
                    "train.total": "2B",
                    "stream.max_epochs": 1e6,  # nobody uses the model
                    "train.eval_tokens": 0,
                    "train.sample_tokens": 0,
                    "checkpoint.every_steps": 50,
                    "elastic.max_workers": 2,
                }
            )
            file = Path(folder) / "config.yaml"
            file.write_text(configs.dump(st.prepare(config)))
            log = (Path(folder) / "driver.log").open("w+")
            command = [sys.executable, "-m", "springtide.cli.main", "train", "--config", str(file)]
            driver = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                found = play(server, driver, seconds)
            except Exception:
                print(Path(log.name).read_text()[-5000:], file=sys.stderr)  # why the driver ended
                raise
            finally:
                driver.kill()
                driver.wait()
            found["told"] = [line for line in Path(log.name).read_text().splitlines() if "journal" in line]
        log.close()
    found["ok"] = bool(found["verified"] and found["steps_meanwhile"] and not found["failures"] and not found["status"])
    print(json.dumps(found))
    return 0 if found["ok"] else 1


def play(server: s3_server.Server, driver: subprocess.Popen[bytes], seconds: float) -> dict[str, object]:
    """Let the server be away for a while, then ask the driver to stop."""
    wait_for(driver, lambda: len(steps()) > _STEPS_BEFORE)
    away_s = time.time()
    server.kill()
    time.sleep(seconds)  # the outage
    back_s = time.time()
    server.start()
    wait_for(driver, lambda: any(one.time_s > back_s for one in steps()))
    driver.send_signal(signal.SIGINT)
    status = driver.wait(_PATIENCE_S)
    run = st.open_run("s3://checkpoints/runs/away")
    verified = run.verify()
    meanwhile = [one for one in run.steps if away_s < one.time_s < back_s]
    return {
        "away_s": round(back_s - away_s, 1),
        "steps": run.last_step,
        "steps_meanwhile": len(meanwhile),
        "longest_gap_s": round(max(b.time_s - a.time_s for a, b in zip(run.steps, run.steps[1:], strict=False)), 1),
        "failures": [one.reason for one in run.events if isinstance(one, Failed)],
        "missing": list(verified.missing),
        "verified": verified.ok,
        "status": status,
        "checkpoints": run.checkpoints,
    }


def steps() -> list[StepDone]:
    """The steps in the journal."""
    try:
        return st.open_run("s3://checkpoints/runs/away").steps
    except (OSError, SpringtideError):  # not yet
        return []


def wait_for(driver: subprocess.Popen[bytes], condition: object) -> None:
    """Until the condition holds; raises when the driver has ended, or after five minutes."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():  # type: ignore[operator]
        if driver.poll() is not None:
            raise RuntimeError(f"the driver ended with {driver.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen within five minutes")
        time.sleep(1.0)  # between looks at the journal, which is written every ten seconds


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
