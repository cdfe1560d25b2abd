"""From an experiment's file to cells: complete configs, one for each setting and seed, checked before any of them runs.

    question = "What does a baseline buy?"             # in words
    recipe = "grpo"                                    # of every cell that names no other
    settings = { steps = 40 }                          # what all cells change of the scale's base settings
    grid = { learning_rate = [1e-4, 1e-3], engine.max_rows = [64, 512] }   # every combination is a cell
    cells = { sft = { recipe = "sft" }, rl = { policy = "cell:sft" } }     # and so is every one of these,
    cells.zero_shot = { recipe = "eval", grid = { max_tokens = [64, 128] } }   # which may have a grid of its own
    focus = { best = 2, steps = 80 }                   # then the best settings again, changed so
    jobs = 1                                           # cells side by side, where the command line does not say it

Tables `embedded` and `paper` hold keys of the same names for one scale alone, which go over these. The base settings
of each scale stand in `scales.toml` beside the shipped experiments, once for all of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from veritune.commands.launch import RECIPES, config_class
from veritune.core.config import CommonConfig, from_mapping, read_toml
from veritune.core.errors import ConfigError
from veritune.core.tables import flatten, overlay

Scale = Literal["embedded", "paper"]
Settings = Mapping[str, Any]

KEYS = ("question", "recipe", "problems", "settings", "grid", "cells", "focus", "jobs")
FROM_CELL = "cell:"
"""What `policy` or `reuse` starts with to mean another cell of the same seed."""


@dataclass(frozen=True)
class Experiment:
    """An experiment's file at one scale."""

    name: str
    question: str
    scale: Scale
    recipe: str
    base: Mapping[str, Settings]
    """For each recipe, the settings that the scale starts from."""
    settings: Mapping[str, Settings]
    """For each cell by name, what it changes of them."""
    focus: Mapping[str, Any] = field(default_factory=dict)
    """`best`, and what the focused cells change on top."""
    jobs: int | None = None
    """How many cells run side by side, if the file says it."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    setting: str
    recipe: str
    config: CommonConfig
    """Complete, but for a policy or reuse that starts with FROM_CELL."""

    @property
    def path(self) -> Path:
        """The run folder."""
        assert self.config.run is not None
        return self.config.run

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.path.name}"

    @property
    def needs(self) -> list[str]:
        """The settings whose runs of the same seed must have ended well before this one starts."""
        return [value.removeprefix(FROM_CELL) for value in self.references.values()]

    @property
    def references(self) -> dict[str, str]:
        """The fields that mean another cell."""
        values = {name: str(getattr(self.config, name)) for name in ("policy", "reuse") if hasattr(self.config, name)}
        return {name: value for name, value in values.items() if value.startswith(FROM_CELL)}


# --- Files -------------------------------------------------------------------------------------------------------


def shipped_experiments() -> list[str]:
    """The names that `load_experiment` knows without a path."""
    return sorted(path.stem for path in _shipped_folder().glob("*.toml") if path.stem != "scales")


def _shipped_folder() -> Path:
    return Path(str(resources.files("veritune"))) / "assets" / "experiments"


def load_experiment(name_or_path: str, scale: Scale) -> Experiment:
    """A shipped experiment, or a file of the same form, at a scale; ConfigError names what is wrong with it."""
    shipped = name_or_path in shipped_experiments()
    path = _shipped_folder() / f"{name_or_path}.toml" if shipped else Path(name_or_path)
    if not shipped and not path.is_file():
        known = ", ".join(shipped_experiments())
        raise ConfigError(f"experiment is {name_or_path!r}; it must be one of {known}, or the path of a TOML file")
    values = read_toml(path)
    merged = {key: value for key, value in values.items() if key not in ("embedded", "paper")}
    for key in merged.keys() & {"settings", "grid", "focus"}:
        merged[key] = flatten(_table(merged, key, path))
    for key, value in _table(values, scale, path).items():
        own = flatten(value) if isinstance(value, dict) and key != "cells" else value
        merged[key] = {**_table(merged, key, path), **own} if isinstance(own, dict) else own
    unknown = sorted(set(merged) - set(KEYS))
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; allowed are {', '.join(KEYS)}, embedded, paper")
    for key in ("question", "recipe"):
        if not isinstance(merged.get(key), str):
            raise ConfigError(f"{path}: {key!r} is missing; it must be a text")
    jobs, problems = merged.get("jobs"), merged.get("problems")
    if jobs is not None and not (type(jobs) is int and jobs >= 1):
        raise ConfigError(f"{path}: jobs is {jobs!r}; it must be a number from 1 on")
    if not isinstance(problems, str | None):
        raise ConfigError(f"{path}: problems is {problems!r}; it must be a name")
    settings = _cell_settings(merged, path)
    recipes = {merged["recipe"], *(each["recipe"] for each in settings.values() if "recipe" in each)}
    base = {recipe: base_settings(scale, recipe, problems) for recipe in recipes}
    focus = _table(merged, "focus", path)
    if focus and not (isinstance(focus.get("best"), int) and 1 <= focus["best"] <= len(settings)):
        raise ConfigError(f"{path}: focus.best is {focus.get('best')!r}; it must be between 1 and {len(settings)}")
    return Experiment(path.stem, merged["question"], scale, merged["recipe"], base, settings, focus, jobs)


def _table(values: Settings, key: str, path: Path) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {key} is {found!r}; it must be a table")
    return found


def _cell_settings(merged: Settings, path: Path) -> dict[str, Settings]:
    """What each cell changes: the grid's combinations, then the named cells; one cell where there are neither."""
    common, cells = _table(merged, "settings", path), _table(merged, "cells", path)
    changed = _grid_points("", _table(merged, "grid", path), path) if "grid" in merged else {}
    for name in cells:
        values = _table(cells, name, path)
        own = flatten({key: value for key, value in values.items() if key != "grid"})
        grid = flatten(_table(values, "grid", path))
        points = _grid_points(f"{_word(name)},", grid, path) if grid else None
        if not isinstance(own.get("recipe", ""), str):
            raise ConfigError(f"{path}: cells.{name}.recipe is {own['recipe']!r}; it must be a name")
        named = {_word(name): own} if points is None else {key: {**own, **point} for key, point in points.items()}
        if twice := sorted(changed.keys() & named.keys()):
            raise ConfigError(f"{path}: two cells have the name {twice[0]!r}; names must differ in letters or digits")
        changed |= named
    return {name: {**common, **changes} for name, changes in (changed or {"base": {}}).items()}


def _grid_points(prefix: str, grid: Settings, path: Path) -> dict[str, Settings]:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} is {values!r}; it must be a list of values")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    named: dict[str, Settings] = {
        prefix + ",".join(f"{key}={_word(point[key])}" for key in point): point for point in points
    }
    if len(named) < len(points):
        raise ConfigError(f"{path}: two values of a grid have one name: {', '.join(map(str, grid.values()))}")
    return named


def _word(value: Any) -> str:
    """A value or name as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", str(value).lower() if isinstance(value, bool) else str(value))


def base_settings(scale: Scale, recipe: str, problems: str | None) -> Settings:
    """A scale's settings for a recipe on some problems, its default ones where `problems` is None."""
    path = _shipped_folder() / "scales.toml"
    table = read_toml(path)[scale]
    chosen = problems or next(iter(table["problems"]))
    if chosen not in table["problems"]:
        allowed = ", ".join(table["problems"])
        raise ConfigError(f"problems is {chosen!r}; at scale {scale} they must be one of {allowed}")
    if recipe not in table["recipes"]:
        raise ConfigError(f"recipe is {recipe!r}; allowed are {', '.join(RECIPES)}")
    return flatten(table["common"]) | flatten(table["problems"][chosen]) | flatten(table["recipes"][recipe])


# --- Cells -------------------------------------------------------------------------------------------------------


def plan_cells(experiment: Experiment, output: Path, *, seeds: int, threads: int | None) -> list[Cell]:
    """Every cell of the experiment but the focused ones; ConfigError where one of them cannot work."""
    cells = [
        _cell(experiment, setting, changes, output, seed, threads)
        for setting, changes in experiment.settings.items()
        for seed in range(seeds)
    ]
    for cell in cells:
        for needed in cell.needs:
            if needed not in experiment.settings or needed == cell.setting:
                allowed = ", ".join(name for name in experiment.settings if name != cell.setting)
                raise ConfigError(f"cell {cell.setting} needs cell {needed!r}; allowed are {allowed}")
    _refuse_circles(cells)
    for setting in experiment.settings if experiment.focus else ():
        plan_focused_cells(experiment, [setting], output, seeds=seeds, threads=threads)
    return cells


def plan_focused_cells(
    experiment: Experiment, best: Sequence[str], output: Path, *, seeds: int, threads: int | None
) -> list[Cell]:
    """The cells that run the best settings again as `focus` says."""
    changes = {key: value for key, value in experiment.focus.items() if key != "best"}
    return [
        _cell(experiment, f"focused-{setting}", {**experiment.settings[setting], **changes}, output, seed, threads)
        for setting in best
        for seed in range(seeds)
    ]


def _cell(
    experiment: Experiment, setting: str, changes: Settings, output: Path, seed: int, threads: int | None
) -> Cell:
    values = {"recipe": experiment.recipe, **changes}
    recipe = values.pop("recipe")
    values = overlay(config_class(recipe), experiment.base[recipe], values)
    for key in ("run", "seed", "threads"):
        if key in values:
            raise ConfigError(f"{experiment.name}: cell {setting} sets {key}, which the sweep sets itself")
    config = from_mapping(config_class(recipe), values, f"{experiment.name}: cell {setting}")
    return Cell(setting, recipe, replace(config, seed=seed, threads=threads, run=output / setting / f"seed-{seed}"))


def _refuse_circles(cells: Sequence[Cell]) -> None:
    needs = {cell.setting: cell.needs for cell in cells}
    while ready := [setting for setting, needed in needs.items() if not any(each in needs for each in needed)]:
        for setting in ready:
            del needs[setting]
    if needs:
        raise ConfigError(f"cells {', '.join(needs)} need one another in a circle")
