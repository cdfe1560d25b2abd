"""What a discovery problem is, and the exact reading that every problem's verifier starts with.

A candidate is data: lists of whole numbers. No verifier here knows a tolerance, a rounded float or a candidate's own
claim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

MAX_COORDINATE_BITS = 256
"""Larger integers are refused: no known construction comes near, and verification stays fast."""

_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exact verifier says of one candidate."""

    valid: bool
    score: int
    """The problem's own number (points, length, blocks) if valid, else 0."""
    message: str


class Judgement(NamedTuple):
    """A verdict and its grounds: the verified points, None where they were refused, and how many were given."""

    verdict: Verdict
    points: list[Any] | None
    num_points: int


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best value in the literature, such as 593, "2025", "AlphaEvolve (Google DeepMind)"."""

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
    depth: Literal[1, 2]
    """1 where a candidate is a list of integers, 2 where it is a list of rows of integers."""
    read: Callable[[Any], list[Any]]
    """The candidate as lists of Python integers; raises CandidateFault."""
    check: Callable[[list[Any]], tuple[int, str]]
    """Score and message of what was read; raises CandidateFault."""

    def rank(self, score: int) -> int:
        """A number that grows with how good `score` is."""
        return score if self.goal == "maximize" else -score

    def better(self, score: int, other: int | None) -> bool:
        """Whether `score` beats `other`, as any score beats None; ties do not."""
        return other is None or self.rank(score) > self.rank(other)

    def better_of(self, score: int, other: int) -> int:
        """The better one of two scores."""
        return max(score, other, key=self.rank)

    def verify(self, candidate: Any) -> Verdict:
        """Exact and total: any JSON value or NumPy array gets a verdict, none raises."""
        return self.judge(candidate).verdict

    def judge(self, candidate: Any) -> Judgement:
        """The verdict, with the points that it is about; the candidate may stand first in a tuple (`unwrapped`)."""
        candidate = unwrapped(candidate, self.depth)
        given = len(candidate) if _is_list(candidate) else 0
        try:
            points = self.read(candidate)
            score, message = self.check(points)
        except CandidateFault as fault:
            return Judgement(Verdict(False, 0, str(fault)), None, given)
        return Judgement(Verdict(True, score, message), points, given)


class CandidateFault(Exception):
    """Why a candidate is no solution, in words that name the offending place."""


def unwrapped(candidate: Any, depth: int) -> Any:
    """`points` of (points,) and of (points, dimension), which programs for this kind of problem return; else as it is.

    Only a whole candidate of the problem's `depth`, beside which nothing but single values stands, counts as wrapped.
    """
    if not (_is_list(candidate) and len(candidate) and _is_nested(candidate[0], depth)):
        return candidate
    return candidate if any(map(_is_list, candidate[1:])) else candidate[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_nested(value: Any, depth: int) -> bool:
    return _is_list(value) and (depth == 1 or all(_is_nested(item, depth - 1) for item in value))


def first_duplicates(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first pair i < j, in row order, of equal values, found by hashing."""
    first: dict[Hashable, int] = {}
    pairs = ((first.setdefault(value, j), j) for j, value in enumerate(values))
    return min((pair for pair in pairs if pair[0] != pair[1]), default=None)


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
        if not _are_integers(values):
            values = [int(value) if type(value) is float and value.is_integer() else value for value in values]
        if not _are_integers(values):
            values = [integer(value, f"coordinate {k} of {noun} {index}") for k, value in enumerate(values)]
        checked.append(values)
    return checked


def _are_integers(values: list[Any]) -> bool:
    return all(type(value) is int and value.bit_length() <= MAX_COORDINATE_BITS for value in values)


def sequence(value: Any, requirement: str) -> list[Any]:
    """`value` as a list; NumPy arrays become Python numbers of the same kind, so a float stays a float."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise CandidateFault(f"{requirement}, not {_described(value)}")
    return list(value)


def integer(value: Any, place: str) -> int:
    """`value` as a Python integer of at most MAX_COORDINATE_BITS bits: no text, no bool, no float that is not whole."""
    if isinstance(value, np.integer) or (isinstance(value, float | np.floating) and value.is_integer()):
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
