"""What a person sees of a sweep."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from springtide.run.report.charts import draw
from springtide.run.report.sweep_page import cost_chart, curves_chart, figures, importance_chart, points_chart, render
from springtide.tune.rank import rank_trials
from springtide.tune.space import Budget, Point, Range, Sweep
from springtide.tune.trial import Rung, TrialOutcome

HOSTILE = "</title></pre><script>alert('x')</script>--> $\\bad$ &"
RATE = Range("optim.peak_lr", "log_uniform", (1e-4, 1e-2))
LAYERS = Range("model.num_layers", "uniform", (2, 12))
KIND = Range("model.activation", "choice", ("gelu", HOSTILE))
BETAS = Range("optim.betas", "choice", ((0.9, 0.95), (0.9, 0.99)))
SVG = "{http://www.w3.org/2000/svg}"


def sweep_of(*space: Range, mode: str = "min") -> Sweep:
    return Sweep(space, "heldout_loss", "max" if mode == "max" else "min", Budget(16, 4000))


SWEEP = sweep_of(RATE, LAYERS, KIND)


def point(number: int) -> Point:
    return {RATE.field: 1e-4 * 10 ** (number % 3), LAYERS.field: 2 + number % 11, KIND.field: KIND.values[number % 2]}


def trial(number: int, *values: float, status: str = "finished", **more: float) -> TrialOutcome:
    rungs = tuple(Rung(at, 1000 * at, value) for at, value in enumerate(values, start=1))
    return dataclasses.replace(TrialOutcome(number, point(number), status, rungs), **more)  # type: ignore[arg-type]


TRIALS = [
    trial(0, 5.0, 4.0, 3.0, 2.5, worker_s=40.0, dollars=0.5, restarts=2),
    trial(1, 4.5, 3.5, 2.5, 2.0, worker_s=50.0, dollars=1.0),
    trial(2, 6.0, status="stopped", worker_s=10.0, dollars=0.1),
    dataclasses.replace(trial(3, 7.0, math.nan, status="failed", worker_s=20.0), reason=HOSTILE),
    trial(4, math.inf, status="failed", worker_s=5.0),
    trial(5, status="waiting"),
]


def body(html_page: str) -> ET.Element:
    return ET.fromstring(html_page.split("</head>")[1].removesuffix("</html>\n"))


def shown(sweep: Sweep, outcomes: Sequence[TrialOutcome], shares: dict[str, float] | None = None) -> str:
    return render("a <sweep>", sweep, rank_trials(sweep, outcomes), shares or {})


WITHOUT_VALUES = [trial(3, math.nan, status="failed"), trial(4, math.inf), trial(5, status="waiting")]
CHOSEN = [
    dataclasses.replace(trial(number, float(number)), point={KIND.field: HOSTILE, BETAS.field: [0.9, 0.99]})
    for number in range(4)
]


@pytest.mark.parametrize(
    ("sweep", "outcomes"),
    [
        (SWEEP, TRIALS),
        (SWEEP, []),
        (SWEEP, TRIALS[:1]),
        (SWEEP, WITHOUT_VALUES),
        (SWEEP, [trial(number, 1e300 * (-1) ** number) for number in range(5)]),
        (SWEEP, [trial(number, 2.0) for number in range(5)]),
        (SWEEP, [trial(number, 9.0, number / 7, worker_s=9e5) for number in range(60)]),
        (sweep_of(RATE, mode="max"), TRIALS),
        (sweep_of(KIND, BETAS), CHOSEN),
    ],
    ids=["all kinds", "none", "one", "no values", "huge", "constant", "sixty", "one field", "all choices"],
)
def test_whatever_the_trials_came_to_the_page_is_well_formed_and_needs_nothing_else(
    sweep: Sweep, outcomes: list[TrialOutcome]
) -> None:
    text = shown(sweep, outcomes, dict.fromkeys((one.field for one in sweep.space), 0.5))
    page = body(text)
    assert "a &lt;sweep&gt;" in text
    assert not list(page.iter("script"))
    assert not re.search(r'(src|href)="(?!#)', text)
    [*_, trials] = page.iter("tbody")
    assert len(trials) == len(outcomes)


def test_what_users_wrote_is_shown_and_never_run_nor_read_as_a_formula() -> None:
    hostile = Range(HOSTILE, "uniform", (0, 1))
    outcomes = [dataclasses.replace(one, point={**one.point, HOSTILE: 0.5}) for one in TRIALS]
    text = render(HOSTILE, sweep_of(KIND, hostile), rank_trials(SWEEP, outcomes), {HOSTILE: 1.0})
    assert "<script" not in text
    page = body(text)
    assert page.findtext("h1") == HOSTILE
    drawn = ["".join(one.itertext()) for one in page.iter(f"{SVG}text")]
    assert drawn.count(HOSTILE) == 1  # the axis
    # the bar beside the curves on each scale, and the choice: both leave room for what they label
    assert sum(one.startswith(HOSTILE[:25]) for one in drawn) == 4
    assert any(HOSTILE in cell for row in page.iter("tr") for cell in row.itertext())


def test_the_lines_name_their_trials_and_the_best_is_drawn_last_and_strongest() -> None:
    page = body(shown(SWEEP, TRIALS))
    notes = [title.text or "" for title in page.iter(f"{SVG}title")]
    assert len(notes) == 6 + 2 * 4  # every point, and every curve that has a value, on each scale
    assert notes[5].startswith("trial-0001, finished: 2 after 4,000 tokens; optim.peak_lr 0.001, model.num_layers 3")
    curves = [group.findall(f"{SVG}path")[1].get("stroke") for group in page.iter(f"{SVG}g") if group.get("class")]
    assert [color == "var(--fg)" for color in curves] == [False] * 5 + [True] + 2 * ([False] * 3 + [True])
    strands = points_chart(SWEEP, rank_trials(SWEEP, TRIALS)).strands
    assert [one.number for one, strand in zip(TRIALS, strands, strict=True) if strand.best] == [1]
    assert [strand.faint for strand in strands] == [False, False, True, True, True, True]


def test_points_lie_where_their_values_are_and_end_at_the_objective_they_have() -> None:
    chart = points_chart(SWEEP, rank_trials(SWEEP, TRIALS))
    assert [label for label, _ in chart.axes] == ["peak_lr", "num_layers", "activation", "heldout_loss (min)"]
    places = [[place for _, place in strand.points] for strand in chart.strands]
    assert [line[:2] for line in places[:3]] == [pytest.approx(line) for line in ([0, 0], [0.5, 0.1], [1, 0.2])]
    assert places[1][2] > 0.5 > places[0][2] > places[2][2]  # of one choice, the better lies higher
    assert [line[3:] for line in places] == [[pytest.approx(0.125)], [0.0], [1.0], [], [], []]
    assert [strand.shade for strand in chart.strands] == [0.5, 1.0, 0.0, None, None, None]


def test_of_a_greatest_objective_the_shades_are_the_other_way_round() -> None:
    sweep = sweep_of(RATE, mode="max")
    assert [one.shade for one in points_chart(sweep, rank_trials(sweep, TRIALS)).strands[:3]] == [0.5, 0.0, 1.0]


def test_one_that_diverged_leaves_room_to_the_others_and_the_axis_says_so() -> None:
    outcomes = [*(trial(number, 2 + number / 10) for number in range(9)), trial(9, 1e6)]
    chart = points_chart(SWEEP, rank_trials(SWEEP, outcomes))
    assert chart.strands[9].points[-1][1] == 1.0
    assert chart.strands[8].points[-1][1] > 0.2
    assert chart.axes[-1][1][-1] == (1.0, "≥ 4.025")
    assert curves_chart(SWEEP, rank_trials(SWEEP, outcomes)).y_limits == (2.0, pytest.approx(4.025))


def test_fields_that_end_alike_are_named_in_full() -> None:
    sweep = sweep_of(RATE, Range("other.peak_lr", "uniform", (0.0, 1.0)))
    assert [label for label, _ in points_chart(sweep, rank_trials(sweep, [])).axes[:2]] == [
        "optim.peak_lr",
        "other.peak_lr",
    ]


def test_a_curve_leaves_out_what_is_no_number() -> None:
    strands = curves_chart(SWEEP, rank_trials(SWEEP, TRIALS)).strands
    assert [len(strand.points) for strand in strands] == [4, 4, 1, 1]
    assert strands[3].points == [(1000.0, 7.0)]


def test_the_headline_adds_up_and_has_dollars_when_there_are_any() -> None:
    told = {label: (figure, remark) for label, figure, remark in figures(SWEEP, rank_trials(SWEEP, TRIALS))}
    assert told["trials"] == ("6", "2 finished, 1 stopped, 2 failed, 1 waiting")
    assert told["best"] == ("2.0000", "heldout_loss, nats/token")
    assert (told["tokens"][0], told["worker-seconds"][0]) == ("12,000", "125")
    assert (told["dollars"][0], told["restarts"][0]) == ("1.60", "2")
    free = [dataclasses.replace(one, dollars=0.0) for one in TRIALS]
    assert "dollars" in shown(SWEEP, TRIALS)
    assert "dollars" not in shown(SWEEP, free)
    assert "$</th>" not in shown(SWEEP, free)


def test_what_cost_nothing_has_no_column_and_each_outcome_its_own_color() -> None:
    chart = cost_chart(rank_trials(SWEEP, TRIALS), "", "dollars", {one.number: one.dollars for one in TRIALS})
    assert chart.groups == [
        ("finished", [(0, 0.5), (1, 1.0)]),
        ("stopped", [(2, 0.1)]),
        ("failed", []),
        ("waiting", []),
    ]
    spent = [dataclasses.replace(one, worker_s=9.0, status="failed") for one in TRIALS]
    assert "#dc6803" in draw([cost_chart(rank_trials(SWEEP, spent), "", "", dict.fromkeys(range(6), 9.0))])


def test_the_table_has_the_best_first_and_all_that_became_of_each() -> None:
    *_, table = body(shown(SWEEP, TRIALS)).iter("tbody")
    rows = [["".join(cell.itertext()) for cell in row] for row in table]
    assert [row[0] for row in rows] == [f"trial-000{number}" for number in (1, 0, 3, 2, 4, 5)]
    assert [row.get("class") for row in table] == ["best"] + [None] * 5
    assert rows[1] == [
        *("trial-0000", "finished", "peak_lr 0.0001, num_layers 2, activation gelu"),
        *("2.5000", "4,000", "40", "0.50", "2"),
    ]
    assert rows[2][1] == f"failed: {HOSTILE}"
    assert (rows[4][3], rows[5][3]) == ("inf", "")


def test_what_there_is_nothing_to_show_of_is_not_drawn() -> None:
    assert len(list(body(shown(SWEEP, TRIALS)).iter(f"{SVG}svg"))) == 4
    assert len(list(body(shown(SWEEP, [trial(5, status="waiting")])).iter(f"{SVG}svg"))) == 1


def test_many_long_labels_are_slanted_and_few_are_not() -> None:
    many = sweep_of(*(Range(f"model.a_field_of_many_{number}", "uniform", (0, 1)) for number in range(8)))
    assert "rotate(-18 " in shown(many, [])
    assert "rotate(-18 " not in shown(SWEEP, [])


def test_a_box_shows_the_curves_on_a_log_scale_without_a_script() -> None:
    text = shown(SWEEP, TRIALS)
    [box] = [one for one in body(text).iter("input") if one.get("type") == "checkbox"]
    assert box.get("id") == "log"
    assert "<script" not in text
    below = [trial(number, 0.5, -0.5 * number) for number in range(2)]
    assert "checkbox" not in shown(SWEEP, below), "a value that is not positive has no logarithm"
    flat = [trial(number, 2.0, 2.0) for number in range(3)]
    wide = [trial(number, 10.0 ** (number - 3)) for number in range(7)]
    for outcomes in (flat, wide):
        assert len(list(body(shown(SWEEP, outcomes)).iter("input"))) == 1


def test_trials_lead_to_their_pages_and_say_who_stopped_them() -> None:
    stopped = dataclasses.replace(TRIALS[2], reason="by asha at step 1,200")
    verdict = rank_trials(SWEEP, [*TRIALS[:2], stopped, *TRIALS[3:]])
    pages = {1: "trials/trial-0001/report.html", 2: "trials/trial 2:#?/report.html"}
    page = body(render("a sweep", SWEEP, verdict, {}, pages))
    links = {link.text: link.get("href") for link in page.iter("a")}
    assert links == {
        "trial-0001": "./trials/trial-0001/report.html",
        "trial-0002": "./trials/trial%202%3A%23%3F/report.html",
    }
    *_, rows = page.iter("tbody")
    assert "stopped: by asha at step 1,200" in ["".join(cell.itertext()) for row in rows for cell in row]
    notes = [title.text or "" for title in page.iter(f"{SVG}title")]
    assert any(note.startswith("trial-0002, stopped: by asha at step 1,200: 6 after") for note in notes)


def test_what_mattered_is_ranked_or_said_not_to_be_known() -> None:
    assert importance_chart({"a": 0.1, "b": 0.5}).bars == [("b", 50.0), ("a", 10.0)]
    assert "do not show which field mattered" in shown(SWEEP, TRIALS)
    assert "do not show which field mattered" not in shown(SWEEP, TRIALS, {RATE.field: 1.0})


def test_the_same_sweep_gives_the_same_page() -> None:
    assert shown(SWEEP, TRIALS) == shown(SWEEP, TRIALS)
