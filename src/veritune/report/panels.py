"""What is drawn: panels, made of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from veritune.core.statistics import Estimate, time_scale
from veritune.report.collect import Curve, Run, Setting, curve, number, sample_curve, setting_estimate, validations

MOST_POINTS = 250
"""A line of more steps is drawn as means of consecutive steps."""
LOG_SCALE_ABOVE = 30.0
"""A positive quantity whose largest value is this many times its median is drawn on a logarithmic axis."""

ACCURACY_METRIC = "validation_accuracy"

Across = Literal["steps", "time", "samples"]


@dataclass(frozen=True)
class Quantity:
    """One thing to look at: a file name, a title, and the metrics that say it, each with its label."""

    name: str
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    share: bool = False
    """Whether the values are shares of 1, to be drawn as percentages."""
    against_time: bool = False
    limit: tuple[str, str] | None = None
    """A setting that bounds the quantity, and what to call it."""
    only_if_nonzero: bool = False
    quiet: tuple[str, ...] = ()
    """Labels of metrics that stand in the background."""
    detail: bool = False
    """Whether a comparison of settings puts it among the details."""


PER_RESPONSE, SOLVED = "mean reward per response", "problems solved (%)"
ACCURACY = Quantity(
    "accuracy", "Accuracy", SOLVED, ((ACCURACY_METRIC, "held-out problems"), ("accuracy", "training rollouts")),
    share=True, against_time=True, quiet=("training rollouts",),
)  # fmt: skip
QUANTITIES = (
    ACCURACY,
    Quantity(
        "validation_reward", "Reward on held-out problems", PER_RESPONSE,
        (("validation_reward", "total"), ("validation_format_reward", "format")), against_time=True,
    ),
    Quantity(
        "reward", "Reward of training rollouts", PER_RESPONSE,
        (("reward", "total"), ("format_reward", "format"), ("accuracy", "answer")), against_time=True,
    ),
    Quantity("loss", "Loss", "loss", (("loss", "training"),)),
    Quantity("entropy", "Entropy of the sampling distribution", "nats per token", (("entropy", "training rollouts"),)),
    Quantity(
        "length", "Response length", "tokens per response",
        (("length", "all"), ("length_correct", "correct"), ("length_incorrect", "incorrect")),
        limit=("max_tokens", "max_tokens"),
    ),
    Quantity(
        "gradient_norm", "Gradient norm before clipping", "L2 norm", (("grad_norm", "gradient norm"),),
        limit=("clip_grad_norm", "clipped above"),
    ),
    Quantity(
        "clip_fraction", "Tokens whose ratio was clipped", "response tokens (%)", (("clip_fraction", "clipped"),),
        share=True, only_if_nonzero=True,
    ),
    Quantity("truncation", "Responses cut off at max_tokens", "responses (%)", (("truncated", "cut off"),), share=True),
    Quantity(
        "throughput", "Throughput", "tokens per second",
        (("rollout_tokens_per_second", "rollout"), ("train_tokens_per_second", "training")), detail=True,
    ),
    Quantity(
        "seconds", "Time of each stage", "seconds per step",
        tuple((f"seconds_{stage}", stage) for stage in ("rollout", "record", "train", "validate")), detail=True,
    ),
)  # fmt: skip
SAMPLES = Quantity(
    "samples", "Several samples a problem", SOLVED,
    (("pass_unbiased", "pass@N"), ("best", "Best@N"), ("majority", "majority vote")), share=True,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line to draw, with its band; entries from `complete` on are means over fewer runs than the rest."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    complete: int
    quiet: bool = False
    """Drawn thin and grey behind the others, without its band."""


@dataclass(frozen=True)
class Panel:
    """One figure: everything that is handed to matplotlib."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    share: bool
    log: bool
    limit: tuple[float, str] | None
    across: Across
    """What the horizontal axis counts."""
    detail: bool
    """Whether it belongs among the details."""


@dataclass(frozen=True)
class Outcome:
    """Where the runs of a setting ended, with their mean and its interval."""

    label: str
    runs: tuple[float, ...]
    estimate: Estimate


@dataclass(frozen=True)
class Comparison:
    """The figure in which settings are compared by where they ended, one below the other."""

    outcomes: tuple[Outcome, ...]
    name: str = "outcomes"
    title: str = "Held-out problems at the end"
    x_label: str = "problems solved (%)"
    detail: bool = False


def compare_settings(settings: Sequence[Setting]) -> Comparison | None:
    """The last validation of every run, by setting; None where fewer than two settings have one."""
    outcomes = []
    for setting in settings:
        ends = [rows[-1] for run in setting.runs if (rows := validations(run))]
        values = tuple(value for row in ends if (value := number(row, ACCURACY_METRIC)) is not None)
        trained = setting_estimate(setting, ACCURACY_METRIC, last=True)
        found = trained or setting_estimate(setting, ACCURACY_METRIC, last=False)
        if found:
            outcomes.append(Outcome(setting.label, values, found))
    return Comparison(tuple(outcomes)) if len(outcomes) > 1 else None


def make_panels(settings: Sequence[Setting]) -> list[Panel]:
    """Every panel that has something to show.

    One setting has a line for each metric of a quantity; several settings have a panel for each metric, with a line for
    each setting.
    """
    panels = []
    for quantity in (*QUANTITIES, SAMPLES, *other_quantities(settings)):
        curve_of = sample_curve if quantity is SAMPLES else curve
        if len(settings) == 1:
            curves = [(label, curve_of(settings[0].runs, metric)) for metric, label in quantity.metrics]
            panels += _panels(quantity, quantity.name, quantity.title, curves, settings)
            continue
        shown = quantity.metrics[:1] if quantity is ACCURACY else quantity.metrics
        for metric, label in shown:
            curves = [(setting.label, curve_of(setting.runs, metric)) for setting in settings]
            alone = len(shown) == 1
            name = quantity.name if alone else f"{quantity.name}_{label.replace(' ', '_').replace('@', '_at_')}"
            title = quantity.title if alone and quantity is not ACCURACY else f"{quantity.title}: {label}"
            panels += _panels(quantity, name, title, curves, settings)
    return panels


def other_quantities(settings: Sequence[Setting]) -> list[Quantity]:
    """A quantity for each further metric that changes during some run."""
    known = {metric for quantity in QUANTITIES for metric, _ in quantity.metrics} | {"step", "steps"}
    found = {}
    for run in (run for setting in settings for run in setting.runs):
        for metric in dict.fromkeys(name for row in run.rows for name in row):
            if metric in known or metric.startswith(("seconds_", "validation_")) or metric.endswith(("_low", "_high")):
                continue
            if len({value for row in run.rows if (value := number(row, metric)) is not None}) > 1:
                found[metric] = Quantity(metric, metric.replace("_", " "), metric, ((metric, metric),), detail=True)
    return list(found.values())


def _panels(
    quantity: Quantity, name: str, title: str, curves: Sequence[tuple[str, Curve]], settings: Sequence[Setting]
) -> list[Panel]:
    curves = [(label, each) for label, each in curves if each]
    values = [value for _, each in curves for value in each.mean]
    if all(len(each.steps) < 2 for _, each in curves) or (quantity.only_if_nonzero and not any(values)):
        return []  # a single point is no course; the tables have its number
    runs = [run for setting in settings for run in setting.runs]
    limit = _limit(quantity, runs, max(high for _, each in curves for high in each.high))
    log = not quantity.share and min(values) > 0 and max(values) > LOG_SCALE_ABOVE * median(values)
    detail = quantity not in (*QUANTITIES, SAMPLES) or (quantity.detail and len(settings) > 1)

    def panel(suffix: str, x_label: str, across: Across, lines: Iterable[Line]) -> Panel:
        shared = (quantity.unit, tuple(lines), quantity.share, log, limit, across, detail)
        return Panel(name + suffix, title, x_label, *shared)

    by_step = [_line(quantity, label, tuple(map(float, each.steps)), each) for label, each in curves]
    if quantity is SAMPLES:
        return [panel("", "samples per problem (N)", "samples", by_step)]
    panels = [panel("_steps" if quantity.against_time else "", "step", "steps", by_step)]
    timed = [(label, each, [x for x in each.seconds if x is not None]) for label, each in curves]
    timed = [(label, each, seconds) for label, each, seconds in timed if len(seconds) == len(each.steps)]
    if quantity.against_time and timed:
        divisor, unit = time_scale(max(max(seconds) for _, _, seconds in timed))
        by_time = (_line(quantity, label, tuple(x / divisor for x in seconds), each) for label, each, seconds in timed)
        panels.append(panel("_time", f"wall-clock time ({unit})", "time", by_time))
    return panels


def _line(quantity: Quantity, label: str, x: tuple[float, ...], each: Curve) -> Line:
    block = math.ceil(len(x) / MOST_POINTS)
    x, mean, low, high = (block_means(values, block) for values in (x, each.mean, each.low, each.high))
    return Line(label, x, mean, low, high, math.ceil(each.complete / block), quiet=label in quantity.quiet)


def block_means(values: Sequence[float], block: int) -> tuple[float, ...]:
    """Means of `block` consecutive values, the last of what remains: a long run's course without its noise."""
    return tuple(fmean(values[start : start + block]) for start in range(0, len(values), block))


def _limit(quantity: Quantity, runs: Sequence[Run], largest: float) -> tuple[float, str] | None:
    """The setting that bounds a quantity, if all runs share it and it is near enough to what is drawn."""
    if quantity.limit is None:
        return None
    key, label = quantity.limit
    values = {run.config.get(key) for run in runs}
    value = values.pop()
    if values or not isinstance(value, (int, float)) or value > 1.5 * largest:
        return None
    return float(value), f"{label} {value:g}" if label != key else f"{key} = {value:g}"
