from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veritune.core.statistics import Estimate, change, duration, mean_estimate, student_quantile, time_scale


def test_mean_over_three_seeds_has_students_interval() -> None:
    # Mean 0.7, standard deviation 0.1, t(2) = 4.3027: half width 4.3027 * 0.1 / sqrt(3) = 0.248417.
    estimate = mean_estimate([0.6, 0.7, 0.8])
    assert estimate.value == pytest.approx(0.7)
    assert estimate.low == pytest.approx(0.7 - 0.248417, abs=1e-5)
    assert estimate.high == pytest.approx(0.7 + 0.248417, abs=1e-5)


def test_interval_is_cut_off_at_the_bounds() -> None:
    estimate = mean_estimate([0.9, 1.0], (0.0, 1.0))
    assert estimate == Estimate(pytest.approx(0.95), pytest.approx(0.95 - 12.7062 * 0.05), 1.0)


def test_one_value_has_no_interval() -> None:
    assert mean_estimate([0.4]) == Estimate(0.4)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (30, 2.0423), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_student_quantile(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=0.004)


def test_change_of_proportions_is_newcombes() -> None:
    # Newcombe (1998), table II (a): 56/70 against 48/80, method 10 gives 0.0524 to 0.3339.
    before = Estimate(48 / 80, 0.4905, 0.7004)
    after = Estimate(56 / 70, 0.6918, 0.8770)
    moved = change(before, after)
    assert moved.value == pytest.approx(0.2)
    assert moved.low == pytest.approx(0.0524, abs=1e-4)
    assert moved.high == pytest.approx(0.3339, abs=1e-4)


def test_change_without_intervals_has_none() -> None:
    assert change(Estimate(1.0), Estimate(3.5)) == Estimate(2.5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    estimate = mean_estimate(values)
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low <= estimate.value <= estimate.high
    assert math.isclose(estimate.value - estimate.low, estimate.high - estimate.value, rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 seconds"),
        (179, "179 seconds"),
        (180, "3.0 minutes"),
        (5400, "90.0 minutes"),
        (10800, "3.0 hours"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_time_scale() -> None:
    assert [time_scale(s) for s in (10, 600, 20000)] == [(1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")]
