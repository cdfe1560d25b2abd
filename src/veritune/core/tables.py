"""Settings tables: the settings of a choice live with what is chosen, in a frozen dataclass of its own.

A config declares the choice and its table:

    engine: str = "native"
    '''The engine.'''
    engine_settings: Any = table("engine", "veritune.engines:settings_class")
    '''The settings of the engine that was chosen.'''

`settings_class("native")` is the dataclass. `__post_init__` calls `fill_tables(self)`, so that the field holds the
class's defaults where nothing else was given. One setting has one name everywhere, with a dot behind its table:
`engine.max_rows` in errors, sweeps and reports, `--engine-max-rows` on the command line, and in TOML

    [engine]
    name = "native"
    max_rows = 64

where `name` is the choice itself; `engine = "native"` says the same without a table. A setting that one table alone has
may be given without the table's name: `--max-rows 64`, `max_rows = 64`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from veritune.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """The table of a choice that has no settings."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A field whose dataclass depends on what another field chooses."""

    field: str
    """Its name; it ends with _settings."""
    choice: str
    """The field that chooses."""
    default: str
    """What that one chooses where nothing is said."""
    finder: str
    """module:function that takes the choice and returns the dataclass; imported when it is needed."""

    @property
    def name(self) -> str:
        """The table's name in TOML, and what its settings' names begin with."""
        return self.field.removesuffix("_settings")

    def settings_class(self, chosen: str) -> type:
        """The dataclass of the settings that `chosen` has; ConfigError where there is no such choice."""
        module, function = self.finder.split(":")
        found = getattr(importlib.import_module(module), function)(chosen)
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            raise ConfigError(f"{self.choice} is {chosen!r}, whose settings are {found!r}; they must be a dataclass")
        return found


def table(choice: str, finder: str) -> Any:
    """A field for the settings of what the field `choice` names; see Table."""
    return dataclasses.field(default=None, metadata={"choice": choice, "finder": finder})


def tables(config_class: type) -> list[Table]:
    """The tables of a config class."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    return [
        Table(field.name, choice, str(fields[choice].default), field.metadata["finder"])
        for field in fields.values()
        if (choice := field.metadata.get("choice"))
    ]


# --- One name for each setting -----------------------------------------------------------------------------------


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML's tables as one mapping of settings' names: {"engine": {"name": "vllm", "eager": True}} becomes
    {"engine": "vllm", "engine.eager": True}.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}".removesuffix(".name"): each for inner, each in flatten(value).items()}
        else:
            flat[key.removesuffix(".name")] = value
    return flat


def flat_values(config: Any) -> dict[str, Any]:
    """Every setting of a config by its name, those of its tables last."""
    own = {each.field: each for each in tables(type(config))}
    flat = {name: value for name, value in vars(config).items() if name not in own}
    for field, each in own.items():
        flat |= {f"{each.name}.{name}": value for name, value in vars(getattr(config, field)).items()}
    return flat


def short_names(config_class: type, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Other names of the settings in the tables that `chosen` (names to values) choose, and the full names.

    `max_rows` and `engine_max_rows` are engine.max_rows. A field's name alone is one where nothing else has it.
    """
    own = {field.name for field in dataclasses.fields(config_class)}
    full = [
        (field.name, each.name)
        for each in tables(config_class)
        for field in dataclasses.fields(each.settings_class(chosen.get(each.choice, each.default)))
    ]
    count = Counter(field for field, _ in full)
    alone = {field: f"{table}.{field}" for field, table in full if field not in own and count[field] == 1}
    return alone | {f"{table}_{field}": f"{table}.{field}" for field, table in full if f"{table}_{field}" not in own}


def full_names(config_class: type, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Flat `values` with every setting by its full name, the tables being those that `chosen` choose."""
    full = short_names(config_class, chosen)
    return {full.get(name, name): value for name, value in values.items()}


def overlay(config_class: type, values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `over` on top, both by settings' names; a setting that the new choice lacks is dropped."""
    values = full_names(config_class, values, values)
    over = full_names(config_class, over, values | dict(over))
    dropped: list[str] = []
    for each in tables(config_class):
        if each.choice in over and values.get(each.choice, over[each.choice]) != over[each.choice]:
            kept = {f"{each.name}.{f.name}" for f in dataclasses.fields(each.settings_class(over[each.choice]))}
            dropped += [name for name in values if name.startswith(f"{each.name}.") and name not in kept]
    return {name: value for name, value in values.items() if name not in dropped} | dict(over)
