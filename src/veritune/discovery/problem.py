"""What a discovery problem is, and the exact checks that every problem's verifier starts with.

A candidate is JSON data: lists of integers. No verifier here knows a tolerance, a float or a candidate's own claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

MAX_COORDINATE_BITS = 256
"""Larger integers are refused: no known construction comes near, and verification stays fast."""

_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exact verifier says of one candidate.

    >>> Verdict(valid=True, score=582, message="582 points; minimum squared distance 4 >= maximum squared norm 4")
    """

    valid: bool
    score: int
    """The problem's own number (points, length, blocks) if valid, else 0."""
    message: str


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best value in the literature.

    >>> BestKnown(593, "2025", "AlphaEvolve (Google DeepMind)")
    """

    value: int
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """An open problem: how it is asked, how it is judged, and what is known."""

    name: str
    dimension: int
    statement: str
    """The mathematics, as the prompt gives it."""
    schema: str
    """The shape of a candidate, as the prompt gives it."""
    goal: Literal["maximize", "minimize"]
    bound: int
    """No valid candidate can pass this score; proven, see `bound_source`."""
    bound_source: str
    best_known: BestKnown | None
    verify: Callable[[Any], Verdict]
    """Exact and total: any JSON value gets a verdict, none raises."""

    def better(self, score: int, other: int) -> bool:
        """Whether `score` beats `other`; ties do not."""
        return score > other if self.goal == "maximize" else score < other


class CandidateFault(Exception):
    """Why a candidate is no solution, in words that name the offending place."""


def judged(check: Callable[[Any], tuple[int, str]]) -> Callable[[Any], Verdict]:
    """A verifier from a check that returns (score, message) or raises CandidateFault."""

    def verify(candidate: Any) -> Verdict:
        try:
            score, message = check(candidate)
        except CandidateFault as fault:
            return Verdict(False, 0, str(fault))
        return Verdict(True, score, message)

    return verify


def integer_rows(
    candidate: Any, columns: int, *, noun: str, at_least: int, at_most: int, why_at_most: str
) -> list[list[int]]:
    """`candidate` as rows of `columns` Python integers, or a CandidateFault that names the row and the column.

    The number of rows is judged first, so that an absurd candidate costs nothing.
    """
    rows = sequence(candidate, f"the candidate must be a list of {noun}s")
    if len(rows) < at_least:
        raise CandidateFault(f"{len(rows)} {noun}s given; at least {at_least} are needed")
    if len(rows) > at_most:
        raise CandidateFault(f"{len(rows)} {noun}s exceed {at_most}, {why_at_most}")
    checked = []
    for index, row in enumerate(rows):
        values = sequence(row, f"{noun} {index} must be a list of {columns} integers")
        if len(values) != columns:
            raise CandidateFault(f"{noun} {index} has {len(values)} coordinates; {columns} are required")
        if not all(type(value) is int and value.bit_length() <= MAX_COORDINATE_BITS for value in values):
            values = [integer(value, f"coordinate {k} of {noun} {index}") for k, value in enumerate(values)]
        checked.append(values)
    return checked


def sequence(value: Any, requirement: str) -> list[Any]:
    """`value` as a list; NumPy arrays become Python numbers of the same kind, so a float stays a float."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise CandidateFault(f"{requirement}, not {_described(value)}")
    return list(value)


def integer(value: Any, place: str) -> int:
    """`value` as a Python integer of at most MAX_COORDINATE_BITS bits: no bool, float, NaN or text."""
    if isinstance(value, np.integer):
        value = int(value)
    if type(value) is not int:
        raise CandidateFault(f"{place} is {_described(value)}; only integers are allowed")
    if value.bit_length() > MAX_COORDINATE_BITS:
        raise CandidateFault(f"{place} has {value.bit_length()} bits; at most {MAX_COORDINATE_BITS} are allowed")
    return value


def _described(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return f"the boolean {value}"
    if isinstance(value, float | np.floating):
        return f"the float {value}"
    if isinstance(value, str):
        return f"the string {value[:_SHOWN_CHARACTERS]!a}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a value of type {type(value).__name__}"
