"""One file per problem: a module here with `build(dimension, *sizes) -> Problem` is a problem of that name.

A name may carry further sizes of its family after a colon: `covering_design:6,5` with dimension 11 is C(11, 6, 5).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError
from veritune.discovery.problem import Problem


def problem_names() -> list[str]:
    """The families that can be built, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def _literature() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))


def literature(family: str, size: int | str) -> dict[str, Any]:
    """What known.toml says of a family's problem of this size; empty where it says nothing."""
    return _literature()[family].get(str(size), {})


def require_size(family: str, dimension: int, smallest: int, largest: int) -> None:
    """Refuse a dimension that the family does not have."""
    if not smallest <= dimension <= largest:
        raise ConfigError(f"dimension is {dimension}; for {family} it must lie between {smallest} and {largest}")


def build_problem(name: str, dimension: int) -> Problem:
    """The problem `name` (with further sizes after a colon, where its family has them) in `dimension`.

    Raises ConfigError for an unknown name or an impossible size.
    """
    family, _, sizes_text = name.partition(":")
    if family not in problem_names():
        raise ConfigError(f"problem is {name!r}; it must be one of {', '.join(problem_names())}")
    if sizes_text and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", sizes_text):
        raise ConfigError(f"problem is {name!r}; after the colon it must have integers such as covering_design:6,5")
    sizes = [int(text) for text in sizes_text.split(",")] if sizes_text else []
    build = importlib.import_module(f"{__name__}.{family}").build
    try:
        inspect.signature(build).bind(dimension, *sizes)
    except TypeError:
        wanted = ", ".join(list(inspect.signature(build).parameters)[1:]) or "none"
        raise ConfigError(f"problem is {name!r}; the sizes after the colon must be: {wanted}") from None
    problem: Problem = build(dimension, *sizes)
    return problem
