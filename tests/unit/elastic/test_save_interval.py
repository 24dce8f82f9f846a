"""The cadence is the one that wastes least, within its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic import mean_time_to_loss, snapshot_every, young_daly_interval


def waste(every_s: float, save_s: float, loss_s: float) -> float:
    """Expected wall time over useful time when losses are a Poisson process (Daly 2006, equation 20, without restarts)."""
    return loss_s * math.expm1((every_s + save_s) / loss_s) / every_s


@given(st.floats(0.01, 100.0), st.floats(600.0, 1e6))
def test_no_other_cadence_wastes_noticeably_less(save_s: float, loss_s: float) -> None:
    best = young_daly_interval(save_s, loss_s, 0.0, math.inf).every_s
    found = waste(best, save_s, loss_s)
    for factor in (0.5, 0.7, 0.9, 1.1, 1.5, 2.0):
        assert found <= waste(best * factor, save_s, loss_s) * (1 + 1e-3)


@given(st.floats(0, 1e5), st.floats(1, 1e6), st.floats(1, 100), st.floats(100, 1e5))
def test_it_stays_within_its_bounds(save_s: float, loss_s: float, least_s: float, most_s: float) -> None:
    found = young_daly_interval(save_s, loss_s, least_s, most_s)
    assert least_s <= found.every_s <= most_s
    assert "bounded" not in found.reason or found.every_s in (least_s, most_s)


def test_youngs_first_term() -> None:
    assert young_daly_interval(2.0, 3600.0, 0, 1e9).every_s == pytest.approx(math.sqrt(2 * 2.0 * 3600.0), rel=0.02)
    assert (
        "a save costs 2.00 s, a loss comes every 1.00 h: best 119 s" in young_daly_interval(2.0, 3600.0, 0, 1e9).reason
    )


def test_what_is_seen_outweighs_what_was_expected() -> None:
    assert mean_time_to_loss(3600, 0, 0) == 3600
    assert mean_time_to_loss(3600, 36_000, 0) == 39_600  # no loss in ten hours
    assert mean_time_to_loss(3600, 36_000, 100) == pytest.approx(36_000 / 100, rel=0.1)


@given(st.floats(1e-6, 10), st.floats(1e-3, 100))
def test_snapshots_take_no_more_than_their_share(copy_s: float, step_s: float) -> None:
    k = snapshot_every(copy_s, step_s, 0.03)
    assert copy_s / (k * step_s) <= 0.03 * (1 + 1e-9)
    assert k == 1 or copy_s / ((k - 1) * step_s) > 0.03 * (1 - 1e-9)


@given(st.floats(1e-6, 10), st.floats(1e-3, 100), st.integers(1, 100))
def test_snapshots_do_not_waver(copy_s: float, step_s: float, now: int) -> None:
    k = snapshot_every(copy_s, step_s, 0.03, now)
    assert copy_s / (k * step_s) <= 0.03 * 1.3 * (1 + 1e-9)
    assert snapshot_every(copy_s, step_s, 0.03, k) in (k, snapshot_every(copy_s, step_s, 0.03))
    for noise in (0.8, 1.2):  # around a figure that was chosen
        chosen = snapshot_every(copy_s, step_s, 0.03)
        if chosen > 1:
            assert snapshot_every(copy_s * noise, step_s, 0.03, chosen) == chosen
