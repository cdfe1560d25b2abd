"""Countdown's evaluator: the judge's parser with everything but integers and the four operations refused."""

from __future__ import annotations

from fractions import Fraction

from veritune.grading.math.limits import UnreadableError
from veritune.grading.math.nodes import Node
from veritune.grading.math.parser import parse
from veritune.grading.math.tokens import tokenize

MAX_ARITHMETIC_CHARACTERS = 1_000
_ALLOWED = frozenset("0123456789+-*/() \t\r\n")
_MAX_MAGNITUDE = Fraction(10) ** 300  # so that float() of every result is finite


def evaluate_arithmetic(text: str) -> Fraction | None:
    """The exact value of an equation made of unsigned integers, `+ - * /`, brackets and white space.

    A sign before a number or a bracket is read (`-(3-5)` is 2). None for anything else: other characters, `2(3)`, `**`,
    `//`, a missing operand, a division by zero, more than 1,000 characters, brackets nested too deep, or a value of
    10^300 and more. Never raises on a string.

    >>> evaluate_arithmetic("(3 + 5) / 6")
    Fraction(4, 3)
    """
    if len(text) > MAX_ARITHMETIC_CHARACTERS or not _ALLOWED.issuperset(text):
        return None
    try:
        value = _value(parse(tokenize(text)))
    except (UnreadableError, ZeroDivisionError):
        return None
    return value if abs(value) < _MAX_MAGNITUDE else None


def _value(node: Node) -> Fraction:
    if node.kind == "number":
        return Fraction(node.value)
    operands = [_value(child) for child in node.children]
    if node.kind == "neg":
        return -operands[0]
    if node.kind == "add":
        return sum(operands, Fraction(0))
    if node.kind == "div":
        return operands[0] / operands[1]
    if node.kind == "mul":
        product = Fraction(1)
        for operand in operands:
            product *= operand
        return product
    raise UnreadableError(f"{node.kind} is no operation of plain arithmetic")
