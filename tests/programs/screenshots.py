"""Pictures of what a user sees, for the docs: ``make screenshots``. Needs Chromium on the path or in $CHROMIUM; three minutes.

Trains a run of two workers on a private cluster; when one of them has been killed and the other trains on, takes pictures of
the pages of Ray's dashboard, of the run's report and of MLflow.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64)

import browser
import mlflow_server
from ports import reserve

from springtide import config as configs
from springtide.api.prepare import prepare
from springtide.api.train import train
from springtide.events import Event, StepDone
from springtide.ray.cluster.local import kill_worker
from springtide.ray.cluster.session import cluster
from springtide.run.folder import open_run

PICTURES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures"
KILL_AT, SHOW_AT, STEPS = 40, 90, 100_000


def shoot(tab: browser.Tab, name: str, height: int = 800, width: int = 1000, dark: bool = False) -> None:
    """Write a picture of what the tab shows."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tab.send("Emulation.setEmulatedMedia", features=[scheme])
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    tab.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
    found = tab.send("Page.captureScreenshot", format="png")
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.png").write_bytes(base64.b64decode(found["data"]))
    print(f"wrote {name}.png", flush=True)


def dashboard(tab: browser.Tab, address: str) -> None:
    """The page of Ray's dashboard on which a run is found."""
    host, port = address.rsplit(":", 1)
    tab.send(
        "Network.setCookie",
        name="ray-authentication-token",
        value=os.environ["RAY_AUTH_TOKEN"],
        url=f"http://{host}:{port}",
    )
    tab.open(f"http://{address}/#/actors", width=1400)
    assert tab.becomes("document.body.innerText.includes('shown/worker')"), "Ray's page of actors does not show the run"
    shoot(tab, "ray-actors", width=1400)


def report(tab: browser.Tab, folder: str) -> None:
    """The run's report, while the run trains."""
    path = Path(folder, "report.html")
    while not path.exists() or "<h2>Restarts</h2>" not in path.read_text():
        time.sleep(1)  # until it is written anew
    for name, width, dark in (("desktop", 1000, False), ("phone", 390, True)):
        tab.open(f"file://{path}", width=width)
        assert tab.becomes("document.querySelector('#charts svg')")
        shoot(tab, f"report-{name}", 1100 if width > 500 else 844, width, dark)


@contextlib.contextmanager
def mlflow_at(folder: Path) -> Iterator[str]:
    """The address of an MLflow server."""
    [port] = reserve(1)
    with mlflow_server.server(folder, port):
        yield f"http://127.0.0.1:{port}"


def tracked(tab: browser.Tab, uri: str, folder: str) -> None:
    """The run's page in MLflow."""
    found = open_run(folder).folder.read_json("mlflow.json")
    tab.open(f"{uri}/#/experiments/{found.get('experiment_id', '1')}/runs/{found['run_id']}", width=1400)
    assert tab.becomes("document.body.innerText.includes('shown')")
    assert tab.becomes("document.body.innerText.includes('springtide')")
    shoot(tab, "mlflow-run", 1000, 1400)


def main() -> None:
    """Train, and take the pictures meanwhile."""
    program = browser.find()
    if program is None:
        sys.exit("no Chromium: put one on the path, or name it in $CHROMIUM")
    with tempfile.TemporaryDirectory() as name, mlflow_at(Path(name)) as uri:
        root = f"{name}/runs"
        changes = {
            "run.root": root,
            "run.id": "shown",
            "shards.root": f"{name}/datasets",
            "elastic.min_workers": 1,
            "elastic.max_workers": 2,
            "train.total": STEPS * 12 * 64,
            "train.eval_every": 30,
            "stream.max_epochs": 1e6,
            "track.mlflow_uri": uri,
            "track.progress": False,
            "track.price": 1.0,
        }
        config = prepare(configs.recipes.tiny().override(changes))
        due: dict[int, Callable[[], object]] = {KILL_AT: kill_worker}
        ready, problems = threading.Event(), list[BaseException]()

        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                for at in [at for at in due if event.step >= at]:
                    due.pop(at)()
                if event.step >= SHOW_AT:
                    ready.set()

        def take(address: str) -> None:
            ready.wait()
            try:
                with browser.tab(program, Path(name) / "profile") as tab:
                    report(tab, f"{root}/shown")
                    tracked(tab, uri, f"{root}/shown")
                    dashboard(tab, address)
            except BaseException as error:
                problems.append(error)
            open_run(f"{root}/shown").stop()

        with cluster(config) as address:
            thread = threading.Thread(target=take, args=(address,))
            thread.start()
            train(config, listen=listen)
            ready.set()
            thread.join()
        if problems:
            raise problems[0]


if __name__ == "__main__":
    main()
