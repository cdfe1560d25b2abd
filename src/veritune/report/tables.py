"""The tables of a report: text cells made from settings and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from veritune.core.statistics import NOTHING, Estimate, change, duration, mean_estimate, wilson_interval
from veritune.report.collect import (
    NOT_A_SETTING,
    Batch,
    Run,
    Setting,
    number,
    sample_curve,
    setting_change,
    setting_estimate,
    shown_value,
    validations,
)


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Measure:
    """A line of the results: which metric, what to call it, how to write it."""

    metric: str
    label: str
    share: bool = False
    digits: int = 2


MEASURES = (
    Measure("validation_accuracy", "Problems solved", share=True),
    Measure("validation_reward", "Reward", digits=3),
    Measure("validation_format_reward", "Format reward", digits=3),
    Measure("validation_length", "Response length (tokens)", digits=1),
    Measure("validation_length_correct", "Length, correct (tokens)", digits=1),
    Measure("validation_length_incorrect", "Length, incorrect (tokens)", digits=1),
    Measure("validation_truncated", "Cut off at max_tokens", share=True),
    Measure("validation_entropy", "Entropy (nats per token)", digits=3),
)
ACCURACY, REWARD, LENGTH = MEASURES[0], MEASURES[1], MEASURES[3]


# --- Writing numbers ---------------------------------------------------------------------------------------------


def written(each: Estimate | None, measure: Measure, *, signed: bool = False) -> str:
    """A number with its interval: "63.1% [58.9, 67.2]"."""
    if each is None:
        return NOTHING
    factor, digits = (100.0, 1) if measure.share else (1.0, measure.digits)

    def one(value: float) -> str:
        # Adding zero turns the -0.0 that rounding can leave into 0.0.
        return f"{round(factor * value, digits) + 0.0:{'+' if signed else ''}.{digits}f}"

    unit = "" if not measure.share else " points" if signed else "%"
    interval = "" if each.low is None or each.high is None else f" [{one(each.low)}, {one(each.high)}]"
    return one(each.value) + unit + interval


# --- Results -----------------------------------------------------------------------------------------------------


def batch_estimate(batch: Batch | None, metric: str, step: int) -> Estimate | None:
    """A validation metric with its interval, from the responses of that validation, where they say it.

    Several responses to a problem are alike, so that an interval that takes them as independent would be too narrow.
    """
    if batch is None or batch.step != step or len({response.id for response in batch.responses}) < len(batch.responses):
        return None
    values: dict[str, list[float]] = {
        "validation_reward": [each.reward for each in batch.responses],
        "validation_format_reward": [each.format_reward for each in batch.responses],
        "validation_truncated": [float(each.truncated) for each in batch.responses],
        "validation_length": [each.tokens for each in batch.responses],
        "validation_length_correct": [each.tokens for each in batch.responses if each.correct],
        "validation_length_incorrect": [each.tokens for each in batch.responses if not each.correct],
    }
    found = values.get(metric)
    if not found:
        return None
    if set(found) <= {0.0, 1.0}:
        return Estimate(fmean(found), *wilson_interval(round(sum(found)), len(found)))
    return mean_estimate(found)


def measured(setting: Setting, measure: Measure, *, last: bool) -> Estimate | None:
    """A measure at the first or last validation: over seeds, or of one run with the interval over its responses."""
    from_rows = setting_estimate(setting, measure.metric, last=last)
    if len(setting.runs) > 1 or from_rows is None or from_rows.low is not None:
        return from_rows
    (run,) = setting.runs
    row = validations(run)[-1 if last else 0]
    batch = run.after if last and run.after else run.before
    return batch_estimate(batch, measure.metric, row["step"]) or from_rows


def before_after(setting: Setting, measure: Measure) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """A measure at the first and at the last validation, and what it changed by."""
    before, after = measured(setting, measure, last=False), measured(setting, measure, last=True)
    if len(setting.runs) > 1:
        return before, after, setting_change(setting, measure.metric)
    return before, after, change(before, after) if before and after else None


def validated_steps(setting: Setting) -> str:
    """The step of the last validation, or its range over the runs."""
    last = [rows[-1]["step"] for run in setting.runs if (rows := validations(run))]
    if not last:
        return NOTHING
    return str(last[0]) if min(last) == max(last) else f"{min(last)} to {max(last)}"


def validated_after(setting: Setting) -> str:
    """The mean time at the last validation."""
    last = [rows[-1] for run in setting.runs if (rows := validations(run))]
    return _mean_duration([number(row, "seconds_elapsed") for row in last])


def _mean_duration(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return duration(fmean(known) if known else None)


def result_table(setting: Setting) -> Table:
    """Every measure of one setting: before, after, change."""
    rows = []
    for measure in MEASURES:
        before, after, moved = before_after(setting, measure)
        if before or after:
            cells = (written(before, measure), written(after, measure), written(moved, measure, signed=True))
            rows.append((measure.label, *cells))
    note = (
        f"Mean over {len(setting.runs)} seeds with Student's 95% interval over them."
        if len(setting.runs) > 1
        else "With 95% intervals over the held-out problems."
    )
    if all(row[2] == NOTHING for row in rows):
        return Table(("Held-out problems", f"at step {validated_steps(setting)}"), tuple(row[:2] for row in rows), note)
    return Table(("Held-out problems", "before", "after", "change"), tuple(rows), note)


def samples_table(settings: Sequence[Setting]) -> Table:
    """One line for each setting and N: how often N samples hold a right one, and how often each choice finds one."""
    names = ("pass_unbiased", "pass", "best", "majority")
    rows: list[tuple[str, ...]] = []
    for setting in settings:
        curves = [sample_curve(setting.runs, name) for name in names]
        for index, n in enumerate(curves[0].steps):
            found = [Estimate(each.mean[index], each.low[index], each.high[index]) for each in curves]
            rows.append((setting.label, str(n), *(written(each, ACCURACY) for each in found)))
    header: tuple[str, ...] = ("Setting", "N", "pass@N", "pass@N (first N)", "Best@N", "majority vote")
    if len(settings) == 1:
        header, rows = header[1:], [row[1:] for row in rows]
    note = "In brackets: of one run, 95% intervals over the held-out problems; of several, the lowest and highest run."
    return Table(header, tuple(rows), note)


def settings_table(settings: Sequence[Setting]) -> Table:
    """One line a setting."""
    rows = []
    for setting in settings:
        before, after, moved = before_after(setting, ACCURACY)
        named = (setting.label, ", ".join(run.seed for run in setting.runs), validated_steps(setting))
        solved = (written(before, ACCURACY), written(after, ACCURACY), written(moved, ACCURACY, signed=True))
        others = (written(measured(setting, measure, last=True), measure) for measure in (REWARD, LENGTH))
        rows.append((*named, *solved, *others, _mean_duration([run.seconds for run in setting.runs])))
    solved_header = ("solved before", "solved after", "change")
    header = ("Setting", "seeds", "steps", *solved_header, "reward after", "tokens after", "time")
    note = "95% intervals: over seeds (Student) where a setting has several, else over problems."
    return Table(header, tuple(rows), note)


def runs_table(settings: Sequence[Setting]) -> Table:
    """One line a run."""
    rows = []
    for setting in settings:
        for run in setting.runs:
            before, after, _ = before_after(Setting(setting.label, {}, (run,)), ACCURACY)
            steps = str(run.last_step) if run.planned_steps is None else f"{run.last_step} of {run.planned_steps}"
            cells = (run.seed, steps, written(before, ACCURACY), written(after, ACCURACY), duration(run.seconds))
            rows.append((str(run.path), setting.label, *cells))
    header = ("Run", "setting", "seed", "steps", "solved before", "solved after", "time")
    return Table(header, tuple(rows), "95% intervals over the held-out problems.")


# --- Configuration and environment -------------------------------------------------------------------------------


def difference_table(settings: Sequence[Setting]) -> Table:
    """The keys that differ between the settings."""
    keys = list(settings[0].difference)
    rows = tuple((key, *(setting.difference[key] for setting in settings)) for key in keys)
    return Table(("Key", *(setting.label for setting in settings)), rows)


def common_table(mappings: Sequence[Mapping[str, Any]], hidden: Sequence[str] = ()) -> Table:
    """Key and value of all mappings; a key whose values differ lists each once."""
    keys = [key for key in dict.fromkeys(key for mapping in mappings for key in mapping) if key not in hidden]
    rows = tuple((key, " | ".join(dict.fromkeys(shown_value(mapping, key) for mapping in mappings))) for key in keys)
    return Table(("Key", "value"), rows)


def config_table(settings: Sequence[Setting]) -> Table:
    """Every setting of the runs but those that the difference table has."""
    configs = [run.config for setting in settings for run in setting.runs]
    return common_table(configs, [*settings[0].difference, *(key for key in NOT_A_SETTING if key != "seed")])


def environment_table(runs: Sequence[Run]) -> Table:
    """Versions, revision, hardware."""
    return common_table([_flat(run.environment) for run in runs])


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in environment.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {name}": each if each is not None else NOTHING for name, each in value.items()}
        else:
            flat[key] = NOTHING if value in (None, "", []) else value
    return flat
