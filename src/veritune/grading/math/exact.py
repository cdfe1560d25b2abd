"""The exact rational value of a tree, with every magnitude bounded before it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from veritune.grading.math.limits import MAX_BITS, MAX_FACTORIAL
from veritune.grading.math.nodes import Node

Rational = int | Fraction


class InexactError(Exception):
    """The tree has no rational value that this module computes (a variable, a radical, a transcendental)."""


class TooLargeError(Exception):
    """The value is rational, but larger than MAX_BITS."""


def exact_value(node: Node) -> Rational:
    """The value as an int where it is whole, else a Fraction.

    Raises InexactError or TooLargeError where there is none, ZeroDivisionError for a division by zero.
    """
    if node.kind == "number":
        return node.value
    rule = _RULES.get(node.kind)
    if rule is None:
        raise InexactError(node.kind)
    value = rule(node, [exact_value(child) for child in node.children])
    if _bits(value) > MAX_BITS:
        raise TooLargeError
    return value


def _bits(value: Rational) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def whole(value: Rational) -> Rational:
    """An int where `value` is whole."""
    return value.numerator if value.denominator == 1 else value


def _divide(top: Rational, bottom: Rational) -> Rational:
    return whole(Fraction(top) / bottom)


def _multiply(node: Node, factors: list[Rational]) -> Rational:
    result: Rational = 1
    for factor in factors:
        result = result * factor
        if _bits(result) > MAX_BITS:
            raise TooLargeError
    return whole(result)


def _power(node: Node, operands: list[Rational]) -> Rational:
    base, exponent = operands
    if isinstance(exponent, int):
        return integer_power(base, exponent)
    root = exact_root(integer_power(base, exponent.numerator), exponent.denominator)
    if root is None or base < 0:
        raise InexactError("power")
    return root


def integer_power(base: Rational, exponent: int) -> Rational:
    """base ** exponent, refused before it is computed where it would be larger than MAX_BITS."""
    if base == 0:
        if exponent <= 0:
            raise ZeroDivisionError
        return 0
    if abs(base) == 1:
        return 1 if base == 1 or exponent % 2 == 0 else -1
    if _bits(base) * abs(exponent) > MAX_BITS:
        raise TooLargeError
    return whole(Fraction(base) ** exponent)


def exact_root(value: Rational, degree: int) -> Rational | None:
    """The real root of `degree`, if it is rational; None where it is not (or not real)."""
    if not 2 <= degree <= 64 or (value < 0 and degree % 2 == 0):
        return None
    top = _integer_root(abs(value.numerator), degree)
    bottom = _integer_root(value.denominator, degree)
    if top is None or bottom is None:
        return None
    return whole(Fraction(-top if value < 0 else top, bottom))


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        guess = math.isqrt(value)
    else:
        guess = 1 << -(-value.bit_length() // degree)
        while guess > 0:  # Newton's iteration from above stops at the floor of the root
            smaller = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
            if smaller >= guess:
                break
            guess = smaller
    return guess if guess**degree == value else None


def _root(node: Node, operands: list[Rational]) -> Rational:
    radicand, degree = operands
    root = exact_root(radicand, degree) if isinstance(degree, int) else None
    if root is None:
        raise InexactError("root")
    return root


def _factorial(node: Node, operands: list[Rational]) -> Rational:
    (operand,) = operands
    if not isinstance(operand, int) or operand < 0:
        raise InexactError("factorial")
    if operand > MAX_FACTORIAL:
        raise TooLargeError
    return math.factorial(operand)


def _binomial(node: Node, operands: list[Rational]) -> Rational:
    top, bottom = operands
    if not (isinstance(top, int) and isinstance(bottom, int) and 0 <= bottom <= top):
        raise InexactError("binomial")
    if top > MAX_FACTORIAL:
        raise TooLargeError
    return math.comb(top, bottom)


def _function(node: Node, arguments: list[Rational]) -> Rational:
    name = node.value
    if name in ("floor", "ceil") and len(arguments) == 1:
        return math.floor(arguments[0]) if name == "floor" else math.ceil(arguments[0])
    if name in ("max", "min"):
        return max(arguments) if name == "max" else min(arguments)
    if name in ("gcd", "lcm"):
        integers = [argument for argument in arguments if isinstance(argument, int)]
        if len(integers) == len(arguments):
            return math.gcd(*integers) if name == "gcd" else math.lcm(*integers)
    raise InexactError(name)


_RULES: dict[str, Callable[[Node, list[Rational]], Rational]] = {
    "add": lambda node, terms: whole(sum(terms, Fraction(0))),
    "neg": lambda node, operands: -operands[0],
    "mul": _multiply,
    "juxtapose": _multiply,
    "div": lambda node, operands: _divide(operands[0], operands[1]),
    "mixed": lambda node, operands: operands[0] + operands[1],
    "percent": lambda node, operands: _divide(operands[0], 100),
    "abs": lambda node, operands: abs(operands[0]),
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
    "function": _function,
}
