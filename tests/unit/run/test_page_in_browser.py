"""The page of a run in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from journal_events import step

from springtide import config as configs
from springtide.events import Evaluated, Sampled, SaveFailed, Started, Stopped
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal

PROGRAM = browser.find()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium: put one on the path, or name it in $CHROMIUM"),
]
SOURCES = ("wiki", "web")
PICTURE = "document.querySelector('#charts svg').getBoundingClientRect()"
VALUES = "[...document.querySelectorAll('#charts output')].map(one => one.textContent)"
ROOM = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    """One browser for this file."""
    with browser.tab(PROGRAM or "", tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run's folder without events."""
    made = Run(Folder(tmp_path / "runs") / "shown")
    made.write_config(configs.recipe("tiny").override({"run.id": "shown", "run.root": str(tmp_path / "runs")}))
    return made


def write(run: Run, first: int, last: int, ends: bool = False) -> None:
    """Write steps as a driver does, with a restart before them."""
    with Journal(run.folder) as journal:
        journal(Started(step=first - 1, world_size=2, num_parameters=10, peak_source="a device"))
        for number in range(first, last + 1):
            journal(step(number, 8.0 - number / 100, SOURCES))
        journal(Evaluated(step=last, heldout_loss=5.0, heldout_bits_per_byte=2.0, rows=4))
        journal(SaveFailed(step=last, reason="no space " * 40, in_a_row=1))
        journal(Sampled(step=last, prompt="def ", text="<img src=x onerror=alert(1)>" * 20))
        if ends:
            journal(Stopped(step=last, status="finished"))


def hover(tab: browser.Tab, share: float) -> list[str]:
    """The values that are shown with the mouse at a share of the first chart's width."""
    tab.value("document.querySelector('#charts svg').scrollIntoView({block: 'center'})")
    tab.value(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    )  # drawn there
    left, top, width = (float(tab.value(f"{PICTURE}.{name}")) for name in ("left", "top", "width"))
    tab.point(left + 56 + share * (width - 66), top + 60)
    assert tab.becomes("document.querySelector('#charts .hair').getAttribute('visibility') === 'visible'")
    found: list[str] = tab.value(VALUES)
    return found


@pytest.mark.parametrize("width", [390, 1000])
def test_the_file_is_whole_and_fits_the_screen(tab: browser.Tab, run: Run, width: int) -> None:
    write(run, 1, 200)
    write(run, 151, 400, ends=True)
    run.write_report()
    tab.errors.clear()
    tab.open(f"file://{run.report}", width)
    assert tab.value("document.querySelectorAll('#charts.drawn > figure > svg').length") == 7
    assert tab.value(ROOM), tab.value("document.documentElement.scrollWidth")
    loss = hover(tab, 0.5)[0]
    assert float(loss) == pytest.approx(8.0 - 200 / 100, abs=0.1)
    assert tab.value("document.getElementById('note').textContent").startswith("step 20")
    tab.value("document.getElementById('shows-log').click()")
    assert float(hover(tab, 1.0)[0]) == pytest.approx(4.0, abs=0.1)
    tab.value("document.getElementById('shows-time').click()")
    assert tab.value("document.querySelector('#charts').textContent.includes(' min')")
    assert [one for one in tab.requests if not one.startswith("file://")] == []
    assert tab.errors == []


def test_without_scripts_the_charts_are_there(tab: browser.Tab, run: Run) -> None:
    write(run, 1, 50)
    run.write_report()
    page = Folder(run.folder.url).read("report.html").decode()
    tab.open(f"file://{run.report}", 390, scripts=False)
    assert page.count("<svg") == 7
    size = tab.send("Page.getLayoutMetrics")["cssContentSize"]
    assert size["width"] <= 390


def test_a_reload_shows_what_the_run_has_done_since(tab: browser.Tab, run: Run) -> None:
    write(run, 1, 100)
    run.write_report()
    tab.errors.clear()
    tab.open(f"file://{run.report}", 390)
    assert tab.value("document.getElementById('note').textContent") == "last step 100"
    assert "training, as of its last event" in tab.value("document.getElementById('about').textContent")
    write(run, 51, 2500, ends=True)  # steps are trained again, and points are thinned from here on
    run.write_report()
    tab.open(f"file://{run.report}", 390)
    assert tab.value("document.getElementById('note').textContent") == "last step 2,500"
    assert "finished" in tab.value("document.getElementById('about').textContent")
    assert "onerror" in tab.value("document.getElementById('samples').textContent")
    assert tab.value("document.images.length") == 0
    assert tab.value(ROOM)
    assert tab.errors == []
