"""Proportions and means with their 95% intervals, and times in a unit that suits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

NOTHING = "–"
"""What stands where there is no number."""
NORMAL_QUANTILE = 1.959964
STUDENT_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""The 97.5% quantile of Student's t with 1, 2, … 30 degrees of freedom."""


def wilson_interval(successes: float, trials: float, z: float = NORMAL_QUANTILE) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return (centre - spread) / scale, (centre + spread) / scale


def share_interval(shares: Sequence[float], most_trials: int) -> tuple[float, float]:
    """The 95% interval of the mean of P independent shares in [0, 1], one a problem.

    Wilson's, with as many trials as would give the variance that the mean shows (Kish's effective sample size), never
    fewer than P and never more than `most_trials`. Shares of 0 and 1 alone give the interval of P trials.
    """
    rate, trials = fmean(shares), float(len(shares))
    if len(shares) > 1 and 0 < rate < 1:
        spread = variance(shares) / len(shares)
        trials = max(trials, min(rate * (1 - rate) / spread, most_trials) if spread else most_trials)
    return wilson_interval(rate * trials, trials)


def accuracy_interval(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """The 95% interval of the share of right responses over problems, siblings of a problem being alike."""
    return share_interval([fmean(group) for group in groups], most_trials=sum(map(len, groups)))


def unbiased_pass_at_n(total: int, correct: int, n: int) -> float:
    """Probability that n of `total` samples, drawn without replacement, hold a `correct` one (arXiv 2107.03374)."""
    return 1 - math.comb(total - correct, n) / math.comb(total, n)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The interval; a number without one is taken as exact."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)


def student_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t, from the table and beyond it to within 0.004."""
    if degrees <= len(STUDENT_QUANTILES):
        return STUDENT_QUANTILES[degrees - 1]
    return NORMAL_QUANTILE + (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / (4 * degrees)


def mean_estimate(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """The mean of independent values, such as one for each seed, with Student's interval cut off at `bounds`."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    spread = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(bounds[0], mean - spread), min(bounds[1], mean + spread))


def change(before: Estimate, after: Estimate) -> Estimate:
    """`after` - `before` with an interval made from theirs (Newcombe 1998, method 10, "square and add").

    It takes the two as independent; on the same problems they agree in part, which makes the interval too wide rather
    than too narrow.
    """
    difference = after.value - before.value
    if before.low is None or after.low is None:
        return Estimate(difference)
    (before_low, before_high), (after_low, after_high) = before.interval, after.interval
    return Estimate(
        difference,
        difference - math.hypot(after.value - after_low, before_high - before.value),
        difference + math.hypot(after_high - after.value, before.value - before_low),
    )


def time_scale(seconds: float) -> tuple[float, str]:
    """The unit to show times up to `seconds` in: how many seconds it has, and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return NOTHING
    size, name = time_scale(seconds)
    return f"{seconds / size:.0f} {name}" if size == 1 else f"{seconds / size:.1f} {name}"
