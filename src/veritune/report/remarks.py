"""Remarks that follow from numbers alone. Each is a small pure function: numbers in, a sentence or None out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from veritune.core.statistics import Estimate
from veritune.report.collect import Curve, Run, Setting, curve, number
from veritune.report.tables import ACCURACY, before_after, validated_steps

RECENT_STEPS = 10
"""How many steps stand for "at the end"."""
MOST_NAMED = 2
"""How many settings a remark names."""


def at_end(each: Curve) -> tuple[float, str]:
    """The mean over the last steps, RECENT_STEPS at most, and "last N steps"."""
    recent = each.mean[-RECENT_STEPS:]
    return fmean(recent), f"last {len(recent)} steps"


def first_and_last(each: Curve) -> tuple[float, float] | None:
    """The means over the first and the last RECENT_STEPS steps; None where these would overlap."""
    if len(each.mean) < 2 * RECENT_STEPS:
        return None
    return fmean(each.mean[:RECENT_STEPS]), fmean(each.mean[-RECENT_STEPS:])


def percent(share: float) -> str:
    """A share of 1 as a percentage: one decimal below 10, none above."""
    return f"{100 * share:.1f}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


# --- One setting -------------------------------------------------------------------------------------------------


def accuracy_changed(before: Estimate, after: Estimate, moved: Estimate, steps: str) -> str:
    """Whether the held-out accuracy moved by more than the interval of the change."""
    span = f"from {percent(before.value)} to {percent(after.value)} after {steps} steps"
    if moved.low is None or moved.high is None:
        return f"Held-out accuracy went {span}."
    points = f"{100 * moved.value:+.1f} points, 95% interval {100 * moved.low:+.1f} to {100 * moved.high:+.1f}"
    verb = "rose" if moved.low > 0 else "fell" if moved.high < 0 else "did not change measurably:"
    return f"Held-out accuracy {verb} {span} ({points})."


def accuracy_past_its_peak(accuracy: Curve) -> str | None:
    """Whether the last validation is below the best one by more than both intervals allow."""
    best = accuracy.mean.index(max(accuracy.mean))
    if accuracy.high[-1] >= accuracy.low[best]:
        return None
    return (
        f"Held-out accuracy was best at step {accuracy.steps[best]} ({percent(accuracy.mean[best])}) "
        f"and has fallen since, to {percent(accuracy.mean[-1])}."
    )


def accuracy_still_rising(accuracy: Curve, at_least: float = 0.03) -> str | None:
    """Whether the last quarter of the run still brought `at_least` this much and the best validation is the last."""
    start, end = accuracy.steps[0], accuracy.steps[-1]
    earlier = sum(step <= start + 0.75 * (end - start) for step in accuracy.steps)
    gained = accuracy.mean[-1] - accuracy.mean[earlier - 1]
    if len(accuracy.mean) < 4 or accuracy.mean[-1] < max(accuracy.mean) or gained < at_least:
        return None
    return f"Held-out accuracy was still rising: {100 * gained:.1f} points came in the last quarter of the run."


def entropy_collapsed(entropy: Curve, accuracy: Curve, below: float = 0.05, flat: float = 0.02) -> str | None:
    """Whether the entropy fell below `below` nats and stayed there, and what the held-out accuracy did since."""
    if entropy.mean[-1] >= below or entropy.mean[0] < below:
        return None
    step = next(step for i, step in enumerate(entropy.steps) if max(entropy.mean[i:]) < below)
    text = f"Entropy fell below {below:g} nats at step {step} and stayed there"
    # The last validation up to that step is what the later ones are compared with.
    known_then = sum(at <= step for at in accuracy.steps)
    since = accuracy.mean[max(known_then - 1, 0) :]
    if len(since) < 2:
        return text + "."
    first, last = since[0], since[-1]
    if abs(last - first) <= flat:
        return f"{text}; held-out accuracy has been flat since ({percent(first)} to {percent(last)})."
    verb = "risen" if last > first else "fallen"
    return f"{text}; held-out accuracy has {verb} since, from {percent(first)} to {percent(last)}."


def responses_cut_off(truncated: Curve, max_tokens: object, above: float = 0.05) -> str | None:
    """Whether more than `above` of the responses were cut off at the end."""
    share, steps = at_end(truncated)
    text = f"{percent(share)} of the responses were cut off at max_tokens ({max_tokens}) in the {steps}."
    return text if share > above else None


def length_changed(length: Curve, factor: float = 1.5) -> str | None:
    """Whether responses became longer or shorter by `factor`."""
    before, after = first_and_last(length) or (0.0, 0.0)
    if min(before, after) <= 0 or 1 / factor < after / before < factor:
        return None
    verb = "grew" if after > before else "shrank"
    return f"Responses {verb} from {before:.0f} to {after:.0f} tokens (first and last {RECENT_STEPS} steps)."


def format_learned(format_reward: Curve, level: float = 0.95) -> str | None:
    """When a format that was not mastered at the start came to be."""
    if format_reward.mean[0] >= level or format_reward.mean[-1] < level:
        return None
    step = next(s for s, mean in zip(format_reward.steps, format_reward.mean, strict=True) if mean >= level)
    return f"The answer format was learned: its reward first reached {level:g} at step {step}."


def format_lost(format_reward: Curve, fall: float = 0.05) -> str | None:
    """Whether the format is kept less often at the end than at the start."""
    before, after = first_and_last(format_reward) or (0.0, 0.0)
    text = f"The format reward fell from {before:.2f} to {after:.2f} (first and last {RECENT_STEPS} steps)."
    return text if before - after > fall else None


def gradient_spikes(norm: Curve, factor: float = 10.0) -> str | None:
    """Whether some gradient was `factor` times the usual one."""
    usual, largest = median(norm.mean), max(norm.mean)
    if usual <= 0 or largest < factor * usual:
        return None
    step = norm.steps[norm.mean.index(largest)]
    return f"The gradient norm spiked to {largest:.3g} at step {step}, {largest / usual:.0f} times its median."


def gradients_clipped(norm: Curve, clip: object, above: float = 0.5) -> str | None:
    """Whether more than `above` of the steps had their gradient scaled down."""
    if not isinstance(clip, (int, float)):
        return None
    share = fmean(value > clip for value in norm.mean)
    return f"The gradient was clipped to {clip:g} in {percent(share)} of the steps." if share > above else None


def groups_teach_nothing(zero_variance: Curve, above: float = 0.5) -> str | None:
    """Whether most groups were paid all alike at the end."""
    share, steps = at_end(zero_variance)
    text = (
        f"In {percent(share)} of the groups of the {steps} every response was paid the same, so they had no gradient."
    )
    return text if share > above else None


def training_ahead(training: Curve, validation: Curve, above: float = 0.1) -> str | None:
    """Whether the training problems are solved much more often than the held-out ones at the end."""
    (trained, steps), held_out = at_end(training), validation.mean[-1]
    compared = f"{percent(trained)} over the {steps} against {percent(held_out)}"
    text = f"Training problems are solved more often than held-out ones: {compared}."
    return text if trained - held_out > above else None


def ratios_clipped(clip_fraction: Curve, above: float = 0.2) -> str | None:
    """Whether a large part of the tokens was clipped away at the end."""
    share, _ = at_end(clip_fraction)
    text = f"{percent(share)} of the response tokens were clipped at the end: updates are far off-policy."
    return text if share > above else None


def engine_disagrees(mismatch_kl: Curve, above: float = 0.01) -> str | None:
    """Whether the engine's and the trainer's log-probabilities differ by more than rounding."""
    largest = max(mismatch_kl.mean)
    step = mismatch_kl.steps[mismatch_kl.mean.index(largest)]
    text = f"Engine and trainer disagree on log-probabilities: mismatch KL reached {largest:.3g} nats at step {step}."
    return text if largest > above else None


def seeds_disagree(finals: Sequence[float], above: float = 0.1) -> str | None:
    """Whether the seeds of a setting end more than `above` apart."""
    if len(finals) < 2 or max(finals) - min(finals) <= above:
        return None
    return f"Seeds end far apart: from {percent(min(finals))} to {percent(max(finals))} held-out accuracy."


def time_spent(stages: dict[str, float]) -> str | None:
    """Where the time went, from the seconds of each stage."""
    total = sum(stages.values())
    if total <= 0 or len(stages) < 2:
        return None
    shares = sorted(((seconds / total, stage) for stage, seconds in stages.items()), reverse=True)
    return "Time went to " + ", ".join(f"{stage} {percent(share)}" for share, stage in shares if share >= 0.005) + "."


# --- One run -----------------------------------------------------------------------------------------------------


def unfinished(last_step: int, planned: int | None, rows: int) -> str | None:
    """Whether a run has steps to go."""
    if rows == 0:
        return "No step has been recorded yet."
    if planned is None or last_step >= planned:
        return None
    return f"The run stands at step {last_step} of {planned}; these are its numbers so far."


def not_finite(run: Run) -> str | None:
    """The first number of a run that is NaN or infinite."""
    values = ((row["step"], metric, value) for row in run.rows for metric, value in row.items())
    faults = (f"{m} is {v} at step {step}." for step, m, v in values if isinstance(v, float) and not math.isfinite(v))
    return next(faults, None)


def run_remarks(run: Run) -> Iterator[str]:
    """What is to be said of a run as a record."""
    yield from filter(None, [unfinished(run.last_step, run.planned_steps, len(run.rows)), not_finite(run)])
    if run.diverged:
        yield f"The run diverged and was given up: {run.diverged}."
    yield from (f"Step {step} was refused; its batch is in {run.path / 'refused'}." for step in run.refused)
    yield from (f"{fault}." for fault in run.faults)


# --- Settings ----------------------------------------------------------------------------------------------------


def setting_remarks(setting: Setting) -> Iterator[str]:
    """What is to be said of a setting's numbers, the most important first."""
    runs, config = setting.runs, setting.runs[0].config
    accuracy, training = curve(runs, "validation_accuracy"), curve(runs, "accuracy")
    found: list[str | None] = []
    if len(accuracy.steps) > 1:
        before, after, moved = before_after(setting, ACCURACY)
        if before and after and moved:
            found.append(accuracy_changed(before, after, moved, validated_steps(setting)))
        found += [accuracy_past_its_peak(accuracy), accuracy_still_rising(accuracy)]
        finals = [each.mean[-1] for run in runs if (each := curve([run], "validation_accuracy"))]
        found.append(seeds_disagree(finals))
    if accuracy and training:
        found.append(training_ahead(training, accuracy))
    if entropy := curve(runs, "entropy"):
        found.append(entropy_collapsed(entropy, accuracy))
    if (truncated := curve(runs, "truncated")) and "max_tokens" in config:
        found.append(responses_cut_off(truncated, config["max_tokens"]))
    if norm := curve(runs, "grad_norm"):
        found.append(gradient_spikes(norm))
        found.append(gradients_clipped(norm, config.get("clip_grad_norm")))
    for metric, remark in (
        ("length", length_changed),
        ("format_reward", format_learned),
        ("format_reward", format_lost),
        ("zero_variance", groups_teach_nothing),
        ("clip_fraction", ratios_clipped),
        ("mismatch_kl", engine_disagrees),
    ):
        if each := curve(runs, metric):
            found.append(remark(each))
    found.append(time_spent(stage_seconds(runs)))
    yield from filter(None, found)


def stage_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of each stage over all steps of the runs."""
    totals: dict[str, float] = defaultdict(float)
    for row in (row for run in runs for row in run.rows):
        for metric in row:
            if metric.startswith("seconds_") and metric != "seconds_elapsed" and (value := number(row, metric)):
                totals[metric.removeprefix("seconds_")] += value
    return totals


def best_setting(finals: dict[str, Estimate]) -> str | None:
    """Which setting ends highest, and which of the others it cannot be told apart from."""
    if len(finals) < 2:
        return None
    (label, best), *others = sorted(finals.items(), key=lambda item: -item[1].value)
    text = f"Highest held-out accuracy at the end: {label} ({percent(best.value)})"
    tied = [other for other, each in others if each.interval[1] >= best.interval[0]]
    if not tied:
        return f"{text}; its interval lies above those of all other settings."
    named = f"{len(tied)} others" if len(tied) > MOST_NAMED else "; ".join(tied)
    return f"{text}; its interval overlaps with {'that' if len(tied) == 1 else 'those'} of {named}."
