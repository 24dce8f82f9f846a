"""Prometheus finds the metrics of a real run where Ray exports them, and every query of the dashboard runs there."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import springtide as st
from springtide.config import Config
from springtide.events import Event, Started, Stopped
from springtide.ray.train.driver_listeners import RayMetrics
from springtide.tracking.prometheus import EXPORTED

pytestmark = [pytest.mark.cluster, pytest.mark.full]
WAIT_S = 120.0
MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
ALERTS = (MONITORING / "springtide-alerts.yml").read_text()
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def drivers_node() -> dict[str, Any]:
    """Ray's record of the node of this process, which exports what a run's driver reports."""
    here = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == here]
    return dict(node)


def scraped(run: str) -> dict[str, float]:
    """What Ray exports of a run on this machine: name -> value, labels but the run left out."""
    node = drivers_node()
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf'^{EXPORTED}(\w+){{[^}}]*\brun="{run}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def until(found: Any, wanted: Any) -> None:
    """Ask until the answer is the one that is wanted: Ray and Prometheus pass values on in their own time."""
    end_s = time.monotonic() + WAIT_S
    while (last := found()) != wanted:
        assert time.monotonic() < end_s, last
        time.sleep(0.5)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """A server that scrapes this machine's Ray; yields its address."""
    node, port = drivers_node(), free_port()
    target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    jobs = [{"job_name": "ray", "static_configs": [{"targets": [target]}]}]
    (folder / "alerts.yml").write_text(ALERTS)
    # a scrape may take as long as the interval, and on busy cores a second is not enough: the series would be stale
    config = {"global": {"scrape_interval": "5s", "evaluation_interval": "5s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config | {"rule_files": ["alerts.yml"]}))
    assert PROMETHEUS
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def ask(server: str, query: str) -> list[Any]:
    """The result of an instant query."""
    address = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        pytest.fail(f"{query}: {error.read().decode()}")
    except urllib.error.URLError:  # it is starting
        return []
    assert found["status"] == "success"
    result: list[Any] = found["data"]["result"]
    return result


def trained(tiny: Config, look: Callable[[Stopped], None]) -> st.Run:
    """Train a run; ``look`` is called at its end, while its driver still exports its last values."""

    def listen(event: Event) -> None:
        if isinstance(event, Stopped):
            look(event)

    return st.train(
        tiny.override({"run.id": "scraped", "elastic.max_workers": 1, "checkpoint.every_steps": 20}), listen=listen
    )


def test_ray_exports_what_the_run_told(ray_cluster: str, tiny: Config) -> None:
    found: dict[str, float] = {}

    def look(stopped: Stopped) -> None:
        # which of a run's last values Ray exports first is its affair
        until(lambda: [scraped("scraped").get(name) for name in ("step", "workers")], [float(stopped.step), 0.0])
        found.update(scraped("scraped"))

    run = trained(tiny, look)
    last = run.steps[-1]
    assert found["loss"] == pytest.approx(last.loss)
    assert found["tokens"] == last.tokens
    assert found["saves_total"] == found["checkpoint_step"] / 20 == len(run.checkpoints)
    assert found["starts_total"] == 1


def test_a_gauge_outlives_the_reports_of_ray(ray_cluster: str) -> None:
    """Ray drops a gauge 20 s after its last report, and a run may have the same workers for days."""
    with RayMetrics("steady") as metrics:
        metrics(Started(step=0, world_size=3))
        until(lambda: scraped("steady").get("workers"), 3.0)
        end_s = time.monotonic() + 45.0
        while time.monotonic() < end_s:
            assert scraped("steady").get("workers") == 3.0
            time.sleep(1.0)


@pytest.mark.skipif(not PROMETHEUS or not PROMTOOL, reason="needs prometheus and promtool, Debian's package prometheus")
def test_every_query_of_the_dashboard_and_every_alert_runs_in_prometheus(
    ray_cluster: str, tiny: Config, tmp_path: Path
) -> None:
    def look(stopped: Stopped) -> None:
        with prometheus(tmp_path) as server:
            until(
                lambda: [one["value"][1] for one in ask(server, f'{EXPORTED}step{{run="scraped"}}')],
                [str(stopped.step)],
            )
            for panel in json.loads((MONITORING / "springtide-dashboard.json").read_text())["panels"]:
                query = panel["targets"][0]["expr"].replace("$run", "scraped").replace("$__rate_interval", "1m")
                name = panel["title"].replace(" ", "_")
                # a rate takes two scrapes; the gauges of a group that has ended go meanwhile, in both at a time
                until(lambda query=query, name=name: bool(ask(server, query)) == (name in scraped("scraped")), True)
            until(lambda: {rule["health"] for rule in rules(server)}, {"ok"})
            assert len(rules(server)) == ALERTS.count("- alert: ")

    trained(tiny, look)
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, "check", "rules", str(tmp_path / "alerts.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rules(server: str) -> list[Any]:
    """The alert rules as the server holds them."""
    with urllib.request.urlopen(f"{server}/api/v1/rules") as answer:
        [group] = json.loads(answer.read())["data"]["groups"]
    found: list[Any] = group["rules"]
    return found
