"""Marks of a chart lie where its axes say, whatever is drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from springtide.run.report.charts import (
    AnyChart,
    Bars,
    Chart,
    Columns,
    Parallel,
    Series,
    Strand,
    Strands,
    draw,
    log_values,
    round_values,
)

SVG = "{http://www.w3.org/2000/svg}"
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def drawn(chart: AnyChart) -> ET.Element:
    return ET.fromstring(draw([chart]))


def scale(picture: ET.Element, anchor: str, axis: str, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The pixels and values of the tick labels of one axis."""
    ticks = []
    for one in picture.iter(f"{SVG}text"):
        found = re.fullmatch(r"(-?[\d.]+(?:e-?\d+)?)([kMG]?)", one.text or "")
        if one.get("text-anchor") == anchor and found:
            ticks.append((float(one.get(axis, "")) - shift, float(found[1]) * UNITS.get(found[2], 1.0)))
    return np.array(sorted(ticks)).T[0], np.array(sorted(ticks)).T[1]


def points_of(path: str) -> np.ndarray:
    return np.array([one.split() for one in re.split("[ML]", path)[1:]], float)


def test_a_curve_passes_the_ticks_at_its_values() -> None:
    picture = drawn(Chart("t", "x", "y", [Series("", [(0, 3000.0), (500, 13000.0), (1000, 5000.0)])]))
    [path] = [one.get("d", "") for one in picture.iter(f"{SVG}path")]
    at = points_of(path)
    pixels, values = scale(picture, "middle", "x")
    assert np.interp(at[:, 0], pixels, values)[:2] == pytest.approx([0, 500], abs=2)
    pixels, values = scale(picture, "end", "y", 3.5)
    assert np.interp(at[1:, 1], pixels, values)[1] == pytest.approx(5000, abs=40)


def test_a_step_is_held_until_the_next_point() -> None:
    at = points_of(
        next(drawn(Chart("", "", "", [Series("", [(0, 2.0), (5, 4.0)], "step")])).iter(f"{SVG}path")).get("d", "")
    )
    assert len(at) == 3
    assert at[0, 1] == at[1, 1] > at[2, 1]
    assert at[1, 0] == at[2, 0]


def test_bars_and_columns_are_as_long_as_their_amounts() -> None:
    bars = list(drawn(Bars("", "", [("a", 30.0), ("b" * 90, 10.0), ("c", 0.0)])).iter(f"{SVG}rect"))
    widths = [float(one.get("width", "")) for one in bars]
    assert widths == pytest.approx([3 * widths[1], widths[1], 0], abs=0.3)
    assert float(bars[0].get("x", "")) <= 260, "half the width stays for the bars, however long a label is"
    picture = drawn(Columns("", "", "", [("one", [(0, 9.0)]), ("none", []), ("other", [(3, 3.0), (5, 6.0)])]))
    columns = [one for one in picture.iter(f"{SVG}rect") if one.get("rx") is None]  # others are the legend's
    heights = [float(one.get("height", "")) for one in columns]
    assert heights == pytest.approx([heights[0], heights[0] / 3, heights[0] * 2 / 3], abs=0.2)
    middles = [float(one.get("x", "")) + float(one.get("width", "")) / 2 for one in columns]
    pixels, values = scale(picture, "middle", "x")
    assert np.interp(middles, pixels, values) == pytest.approx([0, 3, 5], abs=0.02)
    assert [one.get("fill") for one in columns] == ["#2563eb", "#dc6803", "#dc6803"]


@pytest.mark.parametrize("is_log", [False, True])
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6), st.floats(1e-2, 1e3), st.floats(1, 1e3))
@example([1.0, 41617.5], 242.0, 1.0000000000000002)
def test_a_strand_stays_between_the_limits(is_log: bool, values: list[float], low: float, factor: float) -> None:
    points = [(float(at), value) for at, value in enumerate(values)]
    picture = drawn(Strands("", "", "", [Strand(points, "n", 0.5)], (low, low * factor), is_log))
    for path in picture.iter(f"{SVG}path"):
        if path.get("d"):
            assert points_of(path.get("d", "")).min(axis=0)[1] >= 39.9
            assert points_of(path.get("d", "")).max(axis=0)[1] <= 260.1


def test_a_strand_that_leaves_is_cut_where_it_crosses_the_limit() -> None:
    picture = drawn(Strands("", "", "", [Strand([(0, 1.0), (10, 3.0)], "n")], (1.0, 2.0)))
    at = points_of(next(picture.iter(f"{SVG}path")).get("d", ""))
    pixels, values = scale(picture, "middle", "x")
    assert np.interp(at[:, 0], pixels, values) == pytest.approx([0, 5.2], abs=0.05)  # there is 4% of room above


def test_equal_factors_are_equally_far_apart_on_a_log_scale() -> None:
    picture = drawn(Strands("", "", "", [Strand([(0, 1.0), (1, 10.0), (2, 100.0)], "n")], (1.0, 100.0), True))
    [path, _] = [points_of(one.get("d", "")) for one in picture.iter(f"{SVG}path")]
    assert np.diff(np.unique(path[:, 1])) == pytest.approx([np.ptp(path[:, 1]) / 2] * 2, abs=0.2)
    pixels, values = scale(picture, "end", "y", 3.5)
    assert np.diff(pixels) == pytest.approx(np.diff(-np.log10(values)) * np.ptp(path[:, 1]) / 2, abs=0.2)


def test_every_axis_of_parallel_coordinates_has_its_own_ticks() -> None:
    ticks = [(0.0, "1"), (1.0, "9")]
    picture = drawn(Parallel("", [("a", ticks), ("b", ticks)], [Strand([(0.0, 0.0), (1.0, 1.0)], "n", 1.0, best=True)]))
    at = points_of(next(one.get("d", "") for one in picture.iter(f"{SVG}path")))
    places = [float(one.get("y", "")) - 3.5 for one in picture.iter(f"{SVG}text") if one.text == "9"]
    assert [at[1, 1]] * 2 == pytest.approx(places)


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.integers(2, 10), st.booleans())
def test_round_values_are_few_and_evenly_spaced(low: float, length: float, most: int, is_whole: bool) -> None:
    high = low + max(length, 1e-9 * abs(low))
    values = round_values(low, high, most, is_whole)
    assert len(values) <= most + 1
    margin = 1e-9 * max(abs(low), abs(high))
    assert all(low - margin <= value <= high + margin for value in values)
    if is_whole:
        assert all(value == int(value) for value in values)


def test_powers_of_ten_have_company_where_they_are_few() -> None:
    assert log_values(0.3, 30) == [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    assert log_values(1e-5, 1e-1) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
