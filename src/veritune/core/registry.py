"""Named choices that code from outside can join: a task, an engine, a loss, a reward."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from veritune.core.errors import ConfigError

MOST_WORDS = 20
"""A longer list is left out of an error that has a better hint."""


def look_up(setting: str, name: str, known: Mapping[str, Any], entry_points: str = "") -> Any:
    """The object that the value `name` of `setting` means.

    `known` maps names to objects, or to "package.module:attribute" where the import should wait until it is needed.
    Any other name is looked for among the installed packages' entry points of the group `entry_points`, and is itself
    a "package.module:attribute" if it has a colon. Raises ConfigError with the nearest known name.
    """
    found = known.get(name)
    if found is None and ":" in name:
        found = name
    if found is None:
        published = {point.name: point.value for point in _published(entry_points)}
        found = published.get(name)
        if found is None:
            outside = ", or package.module:name"
            raise ConfigError(f"{setting} is {name!r}; {allowed_words(name, [*known, *published], outside)}")
    return import_object(setting, found) if isinstance(found, str) else found


def allowed_words(value: object, allowed: Iterable[object], also: str = "") -> str:
    """The allowed values in words, and the one that `value` may have been meant to be."""
    words = list(map(str, allowed))
    near = difflib.get_close_matches(str(value), words, n=1)
    if near and len(words) > MOST_WORDS:
        return f"did you mean {near[0]}?"
    return f"allowed are {', '.join(words)}{also}" + (f" (did you mean {near[0]}?)" if near else "")


def import_object(setting: str, path: str) -> Any:
    """The object at "package.module:attribute", from the present folder too; ConfigError names the setting."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{setting} is {path!r}; it must be package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that a file there never stands before an installed module
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module from outside can raise anything
        raise ConfigError(
            f"{setting} is {path!r}, but {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{setting} is {path!r}, but {module_name} has no {attribute}{meant}")
    return getattr(module, attribute)


def _published(group: str) -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=group) if group else ()
