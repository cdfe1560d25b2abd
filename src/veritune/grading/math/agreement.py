"""Whether two expressions with radicals, absolute values or functions have one value: decided at points.

Constants are compared with rising precision. Expressions with variables are compared at about a hundred points: of both
signs, small, large, whole and between, on both sides of every kink and pole that the expressions state
(`stations.py`), and in every cell between these, where all of them are smooth, with 64 digits. Where one of the two is
a real number the other must be the same; where one has no real value the other may have none.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from veritune.grading.math.nodes import Node, constant
from veritune.grading.math.numeric import NO_VALUE, NOT_TOLD, compiled, evaluate, precise_context
from veritune.grading.math.stations import critical_arguments, general_points, lines, stations_on

_CLOSE = 1e-9  # machine numbers this close agree
_APART = 1e-6  # machine numbers further apart than this differ; the precise ones decide between
_REAL = 1e-13  # imaginary parts below this, relative to 1 + |value|, may be rounding
_REAL_BITS = 130  # precise ones this much smaller than the value or its terms are rounding
_APART_BITS = 10
_DIGITS_OF_A_BIT = 0.302
_AGREED_DIGITS = 40
_FIRST_DIGITS = 64
_MAX_DIGITS = 1_000
_SPARE_DIGITS = 12
_PRECISE_POINTS = 2  # of the general ones
_ENOUGH_POINTS = 8
_LARGE = 1e300
_FAR = 45.0
_MAX_PRECISE_NODES = 20_000  # what one comparison may spend on precise points

Values = Mapping[str, float]


class Outcome(IntEnum):
    """What one point says of two expressions."""

    SAME = 0
    SAME_COMPLEX = 1
    NEITHER_REAL = 2  # and not the same
    DIFFERENT = 3  # two values of which one is real, or a value and none
    TOO_LARGE = 4  # for machine numbers
    UNKNOWN = 5


_EQUAL = (Outcome.SAME, Outcome.SAME_COMPLEX)


def agree(first: Node, second: Node, names: list[str], seed: int) -> bool:
    """Whether two expressions in the variables `names` agree; `seed`, drawn from the pair, says at which points."""
    try:
        comparison = _Comparison(first, second)
    except (*NO_VALUE, *NOT_TOLD):
        return not names and _compare_precisely(first, second, {}) in _EQUAL
    return comparison.of(names, random.Random(seed)) if names else comparison.at({}) in _EQUAL


class _Comparison:
    """Two expressions as functions, and what the points so far have said of them."""

    def __init__(self, first: Node, second: Node) -> None:
        self.pair = first, second
        self.functions = compiled(first, cmath), compiled(second, cmath)
        self.counts = [0] * len(Outcome)

    def of(self, names: list[str], generator: random.Random) -> bool:
        first, second = self.pair
        self.is_complex = _has_imaginary_unit(first) or _has_imaginary_unit(second)
        self.size = _size(first) + _size(second)
        self.budget = _MAX_PRECISE_NODES
        first_points: list[Values] = []
        for point, role in general_points(names, generator):
            if not self.holds_at(point, isolated=role == "rational"):
                return False
            if len(first_points) < _PRECISE_POINTS:
                first_points.append(point)
                if self.counts[Outcome.UNKNOWN] == _PRECISE_POINTS:
                    return False  # a function without a value of its own, such as f(x)
        if 2 * self.counts[Outcome.UNKNOWN] > sum(self.counts):
            return False
        if not all(self.holds_at(point, precisely=True) for point in first_points):
            return False
        arguments = critical_arguments(first, second)
        for line in lines(names, arguments, generator):
            for point, role in stations_on(line, arguments, generator):
                # The values at the kink itself count only where both are real: x^2/x is x.
                if not self.holds_at(point, precisely=role == "cell", isolated=role == "station"):
                    return False
        return self.decided()

    def at(self, values: Values) -> Outcome:
        """Machine numbers where they tell, else precise ones."""
        left, right = self.functions
        try:
            left = left(values) if callable(left) else left
            right = right(values) if callable(right) else right
            distance, largest = abs(left - right), max(abs(left), abs(right))
        except OverflowError:
            return Outcome.TOO_LARGE if values else _compare_precisely(*self.pair, values)
        except (*NO_VALUE, *NOT_TOLD):
            return _compare_precisely(*self.pair, values)
        if values and distance <= _CLOSE * largest < _LARGE and (is_real := _is_real(left)) == _is_real(right):
            return Outcome.SAME if is_real else Outcome.SAME_COMPLEX
        if values and not largest < _LARGE:
            return Outcome.TOO_LARGE
        # Far out, a factor may have become too small for a machine number's digits.
        if distance > _APART * largest and left and right and all(abs(value) < _FAR for value in values.values()):
            if not values or not left.imag or not right.imag:
                return Outcome.DIFFERENT
            if not _is_real(left) and not _is_real(right):
                return Outcome.NEITHER_REAL
        return _compare_precisely(*self.pair, values)

    def holds_at(self, point: Values, precisely: bool = False, isolated: bool = False) -> bool:
        """Whether the two may still be equal after this point."""
        if precisely:
            self.budget -= self.size
            precisely = self.budget >= 0
        outcome = _compare_precisely(*self.pair, point) if precisely else self.at(point)
        if isolated:
            return outcome is not Outcome.DIFFERENT or not _both_are_real(*self.pair, point)
        if precisely and outcome is Outcome.UNKNOWN:
            return False
        self.counts[outcome] += 1
        return outcome is not Outcome.DIFFERENT and not (self.is_complex and outcome is Outcome.NEITHER_REAL)

    def decided(self) -> bool:
        """Real numbers that agree are enough; without any, the complex ones must all agree."""
        if self.counts[Outcome.SAME] >= _ENOUGH_POINTS:
            return True
        return not self.counts[Outcome.NEITHER_REAL] and self.counts[Outcome.SAME_COMPLEX] >= _ENOUGH_POINTS


def _has_imaginary_unit(node: Node) -> bool:
    return node == constant("i") or any(_has_imaginary_unit(child) for child in node.children)


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.children))


def _is_real(value: Any) -> bool:
    return not value.imag or abs(value.imag) <= _REAL * (1 + abs(value))


def _is_precisely_real(value: Any, context: Any) -> bool:
    return not value.imag or context.mag(value.imag) < max(context.mag(value), context.bits - 20) - _REAL_BITS


def _compare_precisely(first: Node, second: Node, values: Values) -> Outcome:
    """Precision rises until the difference stands, or is below 1e-40 of the largest value or term that was added.

    √(n² + 1) is nearer to n than 1/n² of it: the larger the values, the more digits are compared.
    """
    previous: Any = None
    digits = _FIRST_DIGITS
    while digits <= _MAX_DIGITS:
        context = precise_context(digits)
        try:
            left, right = _value_at(first, context, values), _value_at(second, context, values)
        except NOT_TOLD:
            return Outcome.UNKNOWN
        if left is None or right is None:
            other = right if left is None else left
            return (
                Outcome.NEITHER_REAL if other is None or not _is_precisely_real(other, context) else Outcome.DIFFERENT
            )
        distance = abs(left - right)
        is_real = _is_precisely_real(left, context) or _is_precisely_real(right, context)
        largest = max(context.mag(left) if left else 0, context.mag(right) if right else 0)
        bits = max(largest, context.bits)
        needed = _AGREED_DIGITS + int(2 * _DIGITS_OF_A_BIT * max(0, bits))
        if needed > _MAX_DIGITS - _SPARE_DIGITS:  # too large to tell more than that the first digits agree
            needed = _AGREED_DIGITS
            if largest < bits - _AGREED_DIGITS:
                return Outcome.UNKNOWN
        if digits >= needed + _SPARE_DIGITS:
            above = context.mag(distance) - bits if distance else -math.inf
            if above < -needed / _DIGITS_OF_A_BIT:
                return Outcome.SAME if is_real else Outcome.SAME_COMPLEX
            if above > -_APART_BITS or (previous is not None and abs(distance - previous) < distance / 8):
                return Outcome.DIFFERENT if is_real else Outcome.NEITHER_REAL
            previous = distance
        digits = max(2 * digits, needed + _SPARE_DIGITS)
    return Outcome.UNKNOWN


def _value_at(node: Node, context: Any, values: Values) -> Any:
    """None where the expression is not defined."""
    try:
        return evaluate(node, context, values)
    except NO_VALUE:
        return None


def _both_are_real(first: Node, second: Node, values: Values) -> bool:
    context = precise_context(_FIRST_DIGITS)
    try:
        both = _value_at(first, context, values), _value_at(second, context, values)
    except NOT_TOLD:
        return False
    return all(value is not None and _is_precisely_real(value, context) for value in both)
