"""What a person sees."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import rich.console
from journal_events import step

from springtide.events import (
    Evaluated,
    Event,
    Rejected,
    Sampled,
    Saved,
    SaveFailed,
    SaveIntervalChanged,
    SaveSkipped,
    SnapshotIntervalChanged,
    Started,
    StepDone,
    Stopped,
)
from springtide.run.report.charts import Chart, Series, draw
from springtide.run.report.run_charts import (
    bucket_steps,
    curves,
    energy_chart,
    loss_chart,
    smooth,
    thin,
    wait_chart,
    world_size_chart,
)
from springtide.run.report.run_page import RunFacts, charts, render
from springtide.tracking.console import Console
from springtide.tracking.timeline import timeline_of

HOSTILE = "</pre><script>alert('x')</script>&"


def evaluated(at: int, bits: float) -> Evaluated:
    return Evaluated(step=at, heldout_loss=bits, heldout_bits_per_byte=bits, rows=4, time_s=float(at))


def started(at_s: float, step: int, workers: int) -> Started:
    source = f"step-{step:010d}" if step else ""
    return Started(
        step=step, world_size=workers, time_s=at_s, resumed_from=source, peak_flops=1e9, peak_source="a <source>"
    )


RESIZED: list[Event] = [
    started(0, 0, 2),
    evaluated(0, 4.0),
    *(step(number, 5.0 - number / 10) for number in range(1, 6)),
    started(60, 3, 3),
    *(step(number, 9.0 - number) for number in range(4, 8)),
    started(120, 7, 1),
    *(step(number, 1.0) for number in range(8, 11)),
    Saved(step=10, name="step-0000000010", size_bytes=2**20, save_time_s=0.1, stall_s=0.25, time_s=180.0),
    SaveFailed(step=11, reason="rank 1: No space left on device", in_a_row=2, time_s=181.0),
    SaveSkipped(step=12, reason="the save of step 10 is still being written", time_s=182.0),
    SaveIntervalChanged(step=12, every_s=90.0, reason="a save costs 1.00 s", time_s=183.0),
    SnapshotIntervalChanged(step=12, every_steps=4, reason="one costs 9 ms", time_s=184.0),
    Rejected(step=5, name="step-0000000009", reason="a bit flipped", time_s=185.0),
    evaluated(10, 1.0),
    Sampled(step=10, prompt="def ", text=HOSTILE, time_s=181.0),
    Stopped(step=10, status="finished", time_s=182.0),
]


@pytest.mark.parametrize("events", [[], RESIZED], ids=["nothing yet", "resized twice"])
def test_pages_and_pictures_are_well_formed(events: list[Event]) -> None:
    ET.fromstring(charts(timeline_of(events)))
    page = render("a <run>", timeline_of(events), RunFacts("key: <value>", links={"checkpoints": "s3://a&b"}))
    body = page.split("</head>")[1].removesuffix("</html>\n")
    ET.fromstring(body)
    assert "a &lt;run&gt;" in page


def test_sources_have_their_losses_and_how_often_they_were_read() -> None:
    names = ("wiki", "a<b>", "web")
    page = render("run", timeline_of([RESIZED[0], *(step(number, 5.0, names) for number in range(1, 9)), RESIZED[-1]]))
    ET.fromstring(page.split("</head>")[1].removesuffix("</html>\n"))
    assert "Training loss by source" in page
    for told in ("<td>wiki</td>", "<td>a&lt;b&gt;</td>", "6.000", "33.3%", "2.00", ">24<"):
        assert told in page, told
    assert "by source" not in render("run", timeline_of(RESIZED))


def test_energy_adds_up_by_cause_and_without_any_there_is_no_chart() -> None:
    counted = [
        dataclasses.replace(one, energy_j=10.0, energy_between_j=4.0) if isinstance(one, StepDone) else one
        for one in RESIZED
    ]
    energy = [one for one in curves(timeline_of(counted))["charts"] if one["id"] == "energy"]
    [found] = [{line["name"]: line["y"][-1] for line in one["series"]} for one in energy]
    assert found == {"new steps": 60.0, "recomputed steps": 12.0, "between steps": 48.0}, "steps 4 and 5 came twice"
    assert [one.label for one in energy_chart(timeline_of(counted)).lines] == list(found)
    new = energy[0]["series"][0]
    assert (new["name"], new["style"], new["x"][-2:], new["y"][-2:]) == ("new steps", "line", [9.0, 10.0], [54.0, 60.0])
    odd = [dataclasses.replace(one, energy_j=math.nan) if isinstance(one, StepDone) else one for one in RESIZED]
    for events in (RESIZED, odd, []):
        assert "energy" not in [one["id"] for one in curves(timeline_of(events))["charts"]]
        assert energy_chart(timeline_of(events)).lines == []


def test_text_of_a_model_is_shown_and_never_run() -> None:
    page = render("run", timeline_of(RESIZED))
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page


def test_figures_are_those_of_the_run() -> None:
    page = render("run", timeline_of(RESIZED))
    assert "4.00 → 1.00" in page
    assert "75% less" in page
    assert "a &lt;source&gt;" in page


def test_no_device_is_said_to_do_more_than_its_peak() -> None:
    fast = [dataclasses.replace(one, mfu=2.02) if isinstance(one, StepDone) else one for one in RESIZED]
    out = io.StringIO()
    with Console(1, console=rich.console.Console(file=out, width=200)) as console:
        console(next(one for one in RESIZED if isinstance(one, StepDone)))
        console(next(one for one in fast if isinstance(one, StepDone)))
    for known, unknown in [
        (render("run", timeline_of(RESIZED)), render("run", timeline_of(fast))),
        out.getvalue().splitlines(),
    ]:
        assert "50%" in known
        assert "unknown (peak not known)" in unknown
        assert "202%" not in unknown


def test_a_step_that_was_left_out_is_counted_said_and_drawn_without_its_norm() -> None:
    wild = dataclasses.replace(step(11, 2.0), grad_norm=math.inf, updated=False, loss_scale=32768.0)
    page = render("run", timeline_of([*RESIZED, wild]))
    ET.fromstring(page.split("</head>")[1].removesuffix("</html>\n"))
    assert "steps skipped" in page
    assert "steps skipped" not in render("run", timeline_of(RESIZED))
    out = io.StringIO()
    with Console(20, console=rich.console.Console(file=out, width=200)) as console:
        console(step(10, 2.0))
        console(wild)
    assert "step 11 is skipped: loss 2, gradient norm inf, loss scale 32768" in out.getvalue()
    assert "step 10 is skipped" not in out.getvalue()


def test_what_a_model_writes_commands_no_terminal() -> None:
    out = io.StringIO()
    with Console(1, console=rich.console.Console(file=out, width=200)) as console:
        console(Sampled(step=1, prompt="\x1b]0;title\x07", text="\x1b[2J\x9b31m red\ttab\nline"))
        console.say("lost node \x1b[8m")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert "[2J" in out.getvalue()


def test_a_step_of_no_time_is_drawn_nowhere_it_would_divide() -> None:
    """No run writes it; a journal from elsewhere may."""
    none = dataclasses.replace(step(1), step_time_s=0.0)
    half = dataclasses.replace(step(2), step_time_s=2.0, data_wait_s=1.0)
    assert wait_chart(timeline_of([none, half])).lines[0].points == [(2.0, 0.5)]


def test_a_step_trained_twice_is_drawn_once() -> None:
    [_, raw, held_out] = loss_chart(timeline_of(RESIZED)).lines
    assert raw.points[3:5] == [(4.0, 5.0), (5.0, 4.0)]  # of the second try
    assert len(raw.points) == 10
    assert held_out.points == [(0.0, 4.0), (10.0, 1.0)]


def test_the_world_size_over_time_shows_every_resize() -> None:
    lines = world_size_chart(timeline_of(RESIZED)).lines
    assert [workers for _, workers in lines[0].points if workers] == [2, 3, 1, 1]
    assert [workers for _, workers in lines[1].points] == [3, 1]


def test_a_smoothed_curve_neither_lags_nor_falls_into_a_hole() -> None:
    ramp = [(float(x), float(x)) for x in range(500)]
    assert smooth(ramp)[5:-5] == [pytest.approx(point) for point in ramp[5:-5]]
    assert smooth([(0.0, 3.0), (1.0, math.nan), (2.0, 5.0)]) == [(0.0, 3.0), (2.0, 5.0)]
    holed = smooth([(x, math.nan if x == 250 else 1.0) for x, _ in ramp])
    assert [y for _, y in holed] == pytest.approx([1.0] * 500)
    assert smooth([]) == []


def test_a_single_spike_of_a_long_curve_is_seen() -> None:
    x = np.arange(20_000.0)
    svg = draw([Chart("", "", "", [Series("", thin(x, np.where(x == 7_777, 100.0, 1.0), bucket_steps(20_000)))])])
    [curve] = re.findall(r'd="([^"]*)" fill="none" stroke="#2563eb', svg)
    heights = [float(y) for _, y in re.findall(r"[ML](\S+) ([^L]+)", curve)]
    assert 3 < len(heights) < 2100
    assert max(heights) - min(heights) > 100


def test_the_same_run_gives_the_same_picture() -> None:
    assert charts(timeline_of(RESIZED)) == charts(timeline_of(RESIZED))


def test_without_a_terminal_a_plain_line_comes_now_and_then() -> None:
    now, out = [0.0], io.StringIO()
    with Console(100, console=rich.console.Console(file=out, width=200), clock=lambda: now[0]) as console:
        console(started(0, 0, 2))
        for done in range(1, 101):
            now[0] += 3.0
            console(step(done))
        console(Stopped(step=100, status="stopped", reason="asked to"))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2 workers, from the beginning")
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ") and "tokens/s" in line]
    assert steps == list(range(5, 101, 5))
    assert lines[-1] == "step 100: stopped: asked to"


def test_after_a_restart_lines_go_on_and_are_never_broken() -> None:
    now, out = [0.0], io.StringIO()
    with Console(100, console=rich.console.Console(file=out, width=40), clock=lambda: now[0]) as console:
        for at in (*range(1, 61), "restart", *range(11, 31)):
            now[0] += 3.0
            console(started(0, 10, 3) if at == "restart" else step(int(at)))
    lines = out.getvalue().splitlines()
    restart = next(number for number, line in enumerate(lines) if line.startswith("3 workers, from step 10"))
    assert [line.split("/")[0] for line in lines[restart + 1 :]] == ["step 15", "step 20", "step 25", "step 30"]
    assert all(line.startswith(("step ", "3 workers")) for line in lines)


def test_a_silent_console_says_nothing() -> None:
    out = io.StringIO()
    with Console(10, enabled=False, console=rich.console.Console(file=out)) as console:
        console(started(0, 0, 1))
        console.say("nothing")
        console(step(1))
    assert out.getvalue() == ""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_the_output_cannot_encode_is_replaced(encoding: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    with Console(10, console=rich.console.Console(file=out, width=80)) as console:
        console.say("in 日本/caf\udce9")
        console(Sampled(step=1, prompt="def ", text="\ufffd \x1b 日本"))
        console.say("the next line")
    out.flush()
    printed = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert printed.startswith("in 日本/caf\ufffd\n" if encoding == "utf-8" else "in ??/caf?\n")
    assert ("def \ufffd \ufffd 日本" if encoding == "utf-8" else "def ? ? ??") in printed
    assert printed.endswith("the next line\n")


def test_a_narrow_terminal_without_unicode_shows_the_live_line() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    screen = rich.console.Console(file=out, width=24, force_terminal=True, _environ={"TERM": "xterm"})
    with Console(10, console=screen) as console:
        console(step(1))
    out.flush()
    assert b"step" in out.buffer.getvalue()  # type: ignore[attr-defined]
