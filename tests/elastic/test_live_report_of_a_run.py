"""The report of a run on Ray changes while the run trains, and is the driver's own at its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from live_pages import QUICK, page, writers

import springtide as st
from springtide.config import Config
from springtide.events import Event, Failed, StepDone
from springtide.ray.cluster.local import kill_worker
from springtide.run import live_report

pytestmark = pytest.mark.cluster
WAIT_S = 120.0


@pytest.mark.full
def test_the_report_changes_while_a_run_trains(tiny: Config, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_report, "PROGRAM", ("-c", QUICK))
    changes = {"run.id": "paged", "train.total": "1B", "stream.max_epochs": 1e6, "train.eval_tokens": 0}
    config = tiny.override(changes | {"elastic.min_workers": 1, "elastic.max_workers": 2})
    folder, events = Path(config.run.root) / "paged", list[Event]()
    pages, problems, killed_s = list[str](), list[BaseException](), list[float]()

    def await_page(text: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while text not in (found := page(folder)):
            assert time.monotonic() < end_s
            time.sleep(0.05)  # between looks
        pages.append(found)

    def look() -> None:
        try:
            await_page("<dt>steps</dt>")
            killed_s.append(time.time())
            assert kill_worker()
            await_page("<h2>Restarts</h2>")
            assert len(writers(str(folder))) == 1
        except BaseException as error:
            problems.append(error)
        st.open_run(str(folder)).stop(WAIT_S)

    thread = threading.Thread(target=look)
    thread.start()
    run = st.train(config, listen=events.append)
    thread.join()
    assert not problems, problems
    assert not writers(str(folder))
    last = page(folder)
    assert last not in pages
    assert f"stopped at step {run.last_step}" in last.replace(",", "")
    [failed] = [one for one in events if isinstance(one, Failed)]
    assert failed.time_s - killed_s[0] < 10.0
    assert any(isinstance(one, StepDone) and one.time_s > failed.time_s for one in events)
