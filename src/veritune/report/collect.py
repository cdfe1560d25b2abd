"""From run folders to frozen records: runs, and settings, which are runs that differ in their seed alone."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from veritune.core.config import read_toml
from veritune.core.errors import ConfigError, DataError
from veritune.core.run_folder import CONFIG, ENVIRONMENT, RunFolder
from veritune.core.statistics import Estimate, mean_estimate
from veritune.core.tables import flatten

Row = Mapping[str, Any]

NOT_A_SETTING = ("seed", "run", "threads", "tensorboard", "wandb", "show", "category", "reuse")
"""Keys of a config that do not make two runs two settings."""
LONGEST_LABEL = 80
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which could steer a terminal; marks that reorder text; halves of surrogate pairs."""


@dataclass(frozen=True)
class Response:
    """One response to one problem, as a report shows it."""

    id: str
    question: str
    ground_truth: str
    text: str
    reward: float
    format_reward: float
    answer_reward: float
    tokens: int
    truncated: bool
    advantage: float | None

    @property
    def correct(self) -> bool:
        return self.answer_reward >= 1


@dataclass(frozen=True)
class Batch:
    """The responses of one validation or of one step's rollouts, in the file's order."""

    step: int
    responses: tuple[Response, ...]


@dataclass(frozen=True)
class Run:
    """One run folder."""

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]
    before: Batch | None
    """The responses of the first validation."""
    after: Batch | None
    """The responses of the last validation, if it is not the first."""
    rollouts: tuple[Batch, ...]
    """The rollouts of the first, the middle and the last step."""
    refused: tuple[int, ...]
    """Steps that were refused."""
    diverged: str | None
    """Why a sweep took the run for diverged, if it did."""
    faults: tuple[str, ...]
    """What could not be read, one line each."""

    @property
    def recipe(self) -> str:
        return str(self.environment.get("recipe", "run"))

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", "?"))

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def planned_steps(self) -> int | None:
        return planned_steps(self.rows, self.config.get("steps"))

    @property
    def seconds(self) -> float | None:
        """Seconds that the run has taken, over all its resumptions."""
        return max((s for row in self.rows if (s := number(row, "seconds_elapsed")) is not None), default=None)


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone."""

    label: str
    """What sets this setting apart from the others."""
    difference: Mapping[str, str]
    """The keys that differ between the settings, with this setting's values."""
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Curve:
    """A metric against steps, one entry for each step at which some run of a setting has it."""

    steps: tuple[int, ...]
    seconds: tuple[float | None, ...]
    """Mean of the runs' seconds at that step."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Of one run's validation, the lower end of its 95% interval where it has one; of several runs, the lowest.

    Rollouts have no interval here: siblings are alike, so one that takes them as independent would be too narrow.
    """
    high: tuple[float, ...]
    complete: int
    """How many entries come before the first of the runs ends."""

    def __bool__(self) -> bool:
        return bool(self.steps)


# --- Runs --------------------------------------------------------------------------------------------------------


def collect_run(path: Path) -> Run:
    """Read a run folder. Raises ConfigError if it is none, or has no settings, DataError if its metrics are broken.

    An unfinished run, rows that a killed process left torn and missing or damaged samples are all read as far as
    they go; `Run.faults` says what was passed over.
    """
    folder = RunFolder.open(path)
    config = flatten(read_toml(path / CONFIG))
    if not config:
        raise ConfigError(f"{path / CONFIG} is damaged: it has no setting")
    faults: list[str] = []
    validations, rollouts = folder.steps("validation"), folder.steps("rollouts")
    before = read_batch(folder, "validation", validations[0], faults) if validations else None
    after = read_batch(folder, "validation", validations[-1], faults) if len(validations) > 1 else None
    shown = sorted({rollouts[0], rollouts[len(rollouts) // 2], rollouts[-1]}) if rollouts else []
    batches = [read_batch(folder, "rollouts", step, faults) for step in shown]
    environment: Mapping[str, Any] = {}
    try:
        environment = folder.environment()
    except DataError as error:
        faults.append(f"{ENVIRONMENT} could not be read ({error})")
    return Run(
        path=path,
        config=config,
        environment=environment,
        rows=tuple(folder.metrics()),
        before=before,
        after=after,
        rollouts=tuple(batch for batch in batches if batch),
        refused=tuple(folder.steps("refused")),
        diverged=folder.divergence(),
        faults=tuple(faults),
    )


def read_batch(folder: RunFolder, kind: str, step: int, faults: list[str]) -> Batch | None:
    """The responses under `kind` (validation, rollouts) at `step`; what cannot be read is named in `faults`."""
    try:
        return Batch(step, tuple(_response(row) for row in folder.read_rows(kind, step)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults.append(f"{kind}/step-{step:06d}.jsonl could not be read ({type(error).__name__}: {error})")
        return None


def _response(row: Row) -> Response:
    truth, score = row["ground_truth"], row["score"]
    return Response(
        id=str(row["id"]),
        question=str(row["question"]),
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False),
        text=str(row["response"]),
        reward=float(score["reward"]),
        format_reward=float(score["format_reward"]),
        answer_reward=float(score["answer_reward"]),
        tokens=len(row["response_ids"]),
        truncated=row["finish_reason"] == "length",
        advantage=float(row["advantage"]) if "advantage" in row else None,
    )


# --- Numbers -----------------------------------------------------------------------------------------------------


def planned_steps(rows: Sequence[Row], of_config: object) -> int | None:
    """How many steps a run is to take: its rows say it, else perhaps its config."""
    steps = rows[-1].get("steps", of_config) if rows else of_config
    return steps if isinstance(steps, int) else None


def number(row: Row, metric: str) -> float | None:
    """A row's finite number of that name, or None."""
    value = row.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def validations(run: Run) -> list[Row]:
    """The rows that have a validation."""
    return [row for row in run.rows if any(name.startswith("validation_") for name in row)]


def estimate(row: Row, metric: str) -> Estimate | None:
    """A row's number with the interval that the row has for it, if any."""
    value = number(row, metric)
    if value is None:
        return None
    low, high = number(row, f"{metric}_low"), number(row, f"{metric}_high")
    return Estimate(value) if low is None or high is None else Estimate(value, low, high)


def setting_estimate(setting: Setting, metric: str, *, last: bool) -> Estimate | None:
    """A metric at the first validation, or at the last of the runs that have had a second one.

    Of one run it has the row's own interval, of several the interval over seeds.
    """
    needed = 2 if last else 1
    validated = [rows for run in setting.runs if len(rows := validations(run)) >= needed]
    found = [each for rows in validated if (each := estimate(rows[-1 if last else 0], metric))]
    if len(found) < 2:
        return found[0] if found else None
    bounded = any(each.low is not None for each in found)  # only proportions come with an interval
    return mean_estimate([each.value for each in found], (0.0, 1.0) if bounded else (-math.inf, math.inf))


def setting_change(setting: Setting, metric: str) -> Estimate | None:
    """The mean over seeds of what a metric changed by between a run's first and last validation.

    Each seed is compared with itself, so what the seeds' starts have in common does not widen the interval.
    """
    validated = [rows for run in setting.runs if len(rows := validations(run)) > 1]
    pairs = [(number(rows[0], metric), number(rows[-1], metric)) for rows in validated]
    changes = [after - before for before, after in pairs if before is not None and after is not None]
    return mean_estimate(changes) if changes else None


def curve(runs: Sequence[Run], metric: str, *, with_interval: bool | None = None) -> Curve:
    """A metric over steps: one run's numbers, or the mean, lowest and highest of several runs.

    One run's intervals are taken for validations, unless `with_interval` says otherwise.
    """
    found: dict[int, list[tuple[Estimate, float | None]]] = {}
    ends = []
    for run in runs:
        points = {
            row["step"]: (each, number(row, "seconds_elapsed")) for row in run.rows if (each := estimate(row, metric))
        }
        ends.append(max(points, default=-1))
        for step, point in points.items():
            found.setdefault(step, []).append(point)
    steps = tuple(sorted(found))
    values = [[each.value for each, _ in found[step]] for step in steps]
    spans = [(min(each), max(each)) for each in values]
    if len(runs) == 1 and (metric.startswith("validation_") if with_interval is None else with_interval):
        spans = [found[step][0][0].interval for step in steps]
    return Curve(
        steps=steps,
        seconds=tuple(_mean_seconds(found[step]) for step in steps),
        mean=tuple(fmean(each) for each in values),
        low=tuple(low for low, _ in spans),
        high=tuple(high for _, high in spans),
        complete=sum(step <= min(ends, default=-1) for step in steps),
    )


def sample_curve(runs: Sequence[Run], measure: str) -> Curve:
    """A measure of several samples a problem (pass_unbiased, best, majority) against their number N."""
    at_sizes = []
    for run in runs:
        row = run.rows[-1] if run.rows else {}
        sizes = [int(name.rpartition("_at_")[2]) for name in row if re.fullmatch(rf"{measure}_at_\d+", name)]
        names = {f"{measure}{end}": f"{measure}{end}_at_" for end in ("", "_low", "_high")}
        rows = [{"step": n, **{name: row.get(f"{key}{n}") for name, key in names.items()}} for n in sorted(sizes)]
        at_sizes.append(replace(run, rows=tuple(rows)))
    return curve(at_sizes, measure, with_interval=True)


def _mean_seconds(points: Sequence[tuple[Estimate, float | None]]) -> float | None:
    seconds = [each for _, each in points if each is not None]
    return fmean(seconds) if seconds else None


def visible(text: str) -> str:
    """Model text with everything but printable characters, tabs and line ends replaced by U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


# --- Settings ----------------------------------------------------------------------------------------------------


def collect_settings(paths: Sequence[Path]) -> list[Setting]:
    """Read the runs, each once, and put those together that differ in their seed alone.

    The settings come in the order of their first runs, labelled by what differs between them.
    """
    unique = {path.resolve(): path for path in reversed(paths)}
    groups: dict[str, list[Run]] = {}
    for run in map(collect_run, reversed(unique.values())):
        groups.setdefault(json.dumps(_identity(run), sort_keys=True, default=str), []).append(run)
    identities = [_identity(group[0]) for group in groups.values()]
    keys = differing_keys(identities)
    differences = [{key: shown_value(each, key) for key in keys} for each in identities]
    labels = make_labels(differences)
    return [
        Setting(label or "this run", difference, tuple(sorted(group, key=_seed_order)))
        for label, difference, group in zip(labels, differences, groups.values(), strict=True)
    ]


def _seed_order(run: Run) -> tuple[int, str]:
    return (int(run.seed), "") if run.seed.isdigit() else (-1, run.seed)


def _identity(run: Run) -> dict[str, Any]:
    settings = {key: value for key, value in run.config.items() if key not in NOT_A_SETTING}
    # A policy that a sweep's run of the same seed trained is the same one for all seeds: that of its setting.
    trained = re.fullmatch(rf".*?([^/]+)/seed-{re.escape(run.seed)}/checkpoints/step-\d+", str(settings.get("policy")))
    return {"recipe": run.recipe, **settings, **({"policy": f"of {trained[1]}"} if trained else {})}


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that differ between configs.

    A key that one recipe has and another lacks says no more than that the recipes differ, so it counts only if it
    differs between configs of the same recipe; there, a key that is absent is unset.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    recipes = {config["recipe"] for config in configs}
    families = [[config for config in configs if config["recipe"] == recipe] for recipe in recipes]

    def differs(key: str, among: Sequence[Mapping[str, Any]]) -> bool:
        return len({shown_value(config, key) for config in among}) > 1

    return [
        key
        for key in keys
        if any(differs(key, family) for family in families)
        or (all(key in config for config in configs) and differs(key, configs))
    ]


def shown_value(config: Mapping[str, Any], key: str) -> str:
    """A setting as a person would write it."""
    if key not in config:
        return "unset"
    value = config[key]
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return visible(", ".join(map(str, value)))
    return visible(str(value))


def make_labels(differences: Sequence[Mapping[str, str]]) -> list[str]:
    """The recipe, if no two share one; else all that differs, or, where that is too long, the fewest keys that tell
    the settings apart; else a number."""
    keys = list(differences[0]) if differences else []
    recipes = [difference.get("recipe", "") for difference in differences]
    if len(differences) > 1 and len(set(recipes)) == len(recipes):
        return recipes
    fewer = (chosen for size in (1, 2, 3) for chosen in itertools.combinations(keys, size))
    for chosen in (keys, *fewer):
        labels = [", ".join(f"{key} {difference[key]}" for key in chosen) for difference in differences]
        if len(set(labels)) == len(labels) and all(len(label) <= LONGEST_LABEL for label in labels):
            return labels
    return [f"setting {index}" for index in range(1, len(differences) + 1)]
