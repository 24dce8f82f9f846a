"""What a notebook shows of runs, sweeps and queues: tables and pictures in which names and errors are text."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journal_events import step

from springtide import config as configs
from springtide.api.queue import QueueTable
from springtide.events import Event, Started, Stopped
from springtide.ray.cluster.worker_queue import QueueRow
from springtide.run.folder import Run
from springtide.run.report.run_page import handle
from springtide.storage import Folder
from springtide.tracking.console import Console, bar_html
from springtide.tracking.timeline import timeline_of
from springtide.tune import Rung, SweepResult, TrialOutcome

HOSTILE = "</td><script>alert('x')</script>\x1b[31m"
SHOWN = "&lt;script&gt;alert("


def safe(page: str) -> None:
    assert "<script" not in page
    assert "\x1b" not in page
    assert SHOWN in page


def test_a_run_shows_its_state_and_its_charts() -> None:
    begun = Started(step=0, world_size=2, time_s=0.0)
    events: list[Event] = [begun, *(step(number, 5.0) for number in range(1, 4))]
    page = handle("mine", timeline_of(events))
    assert "<b>mine</b>: running or killed, step 3" in page
    assert "<svg" in page
    failed = Stopped(step=3, status="failed", reason=HOSTILE, time_s=9.0, term=1)
    page = handle(HOSTILE, timeline_of([begun, failed]))
    assert "failed at step 3" in page
    safe(page)
    assert handle("new", timeline_of([])) == "<p><b>new</b>: not started</p>"


def test_a_sweep_is_a_table_with_the_best_first() -> None:
    trials = (
        TrialOutcome(0, {"optim.peak_lr": 0.01}, "failed", reason=HOSTILE),
        TrialOutcome(1, {"optim.peak_lr": 0.002, HOSTILE: 1}, "finished", (Rung(10, 7680, 4.5),)),
        TrialOutcome(2, {"optim.peak_lr": 0.05}, "finished", (Rung(10, 7680, 5.5),)),
    )
    page = SweepResult(trials, trials[1], 12.0, 0.5, 15_360)._repr_html_()
    safe(page)
    assert page.index("trial-0001") < page.index("trial-0002") < page.index("trial-0000")
    assert page.count("bold") == 1
    assert "3 trials, 15,360 tokens, 12 worker-seconds, $0.50" in page
    assert "0 trials" in SweepResult((), None, 0.0, 0.0, 0)._repr_html_()


def test_a_queue_is_a_table() -> None:
    rows = [QueueRow(HOSTILE, "research", 0, 1, 1, 1, 3, "'big' (priority 10) has 2 workers")]
    page = QueueTable(rows, {"research": 8})._repr_html_()
    safe(page)
    assert "<td>1 to 3</td>" in page
    assert "queue research: at most 8 workers" in page
    assert QueueTable([], {})._repr_html_() == "<p>no run is in the queue</p>"


def test_in_a_notebook_a_run_is_one_bar_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(page: str, display_id: bool) -> Any:
        assert display_id
        shown.append(page)
        return SimpleNamespace(update=shown.append)

    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    now_s = [0.0]
    with Console(60, clock=lambda: now_s[0]) as console:
        for number in range(1, 61):
            console(step(number, 5.0))
            now_s[0] += 0.1
    assert shown[0].startswith('<progress value="1" max="60"></progress> step 1/60&ensp;loss 5.000')
    assert shown[-1].startswith('<progress value="60" max="60">')
    assert 15 < len(shown) < 30, "four times a second"
    with Console(60, enabled=False) as console:
        console(step(1, 5.0))
    assert len(shown) < 30
    safe(bar_html(1, 2, HOSTILE))


def test_a_run_that_has_not_begun_shows_that(tmp_path: Path) -> None:
    run = Run(Folder(str(tmp_path / "mine")))
    run.write_config(configs.recipes.tiny())
    assert run._repr_html_() == "<p><b>mine</b>: not started</p>"
