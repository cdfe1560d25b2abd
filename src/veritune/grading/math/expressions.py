"""Whether two scalar expressions have one value: exactly, then modulo primes, then with 40 digits."""

from __future__ import annotations

import zlib

from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.modular import FIELDS, Residue
from veritune.grading.math.nodes import Node
from veritune.grading.math.numeric import evaluate, machine_context, precise_context

_NO_VALUE = (InexactError, TooLargeError, ZeroDivisionError, OverflowError, ValueError, KeyError)
_MACHINE_TOLERANCE = 1e-6  # machine numbers only tell values apart
_PRECISE_TOLERANCE = 1e-28
_SAMPLES = ((0.35, 1.0), (-2.3, 1.0), (1.1, 3.0))
"""Ranges (start, width) of the points at which radicals and functions of variables are compared."""


def equal_expressions(first: Node, second: Node) -> bool:
    """Whether the two trees have one value for all values of their variables; False where that is not decided."""
    if first == second:
        return True
    try:
        return exact_value(first) == exact_value(second)
    except (InexactError, TooLargeError):
        pass
    except ZeroDivisionError:
        return False
    try:
        agree, opaque = _compare_residues(first, second)
    except (InexactError, ZeroDivisionError, TooLargeError):
        return False
    if agree or not opaque:
        return agree
    try:
        return _equal_numerically(first, second)
    except _NO_VALUE:
        return False


def _compare_residues(first: Node, second: Node) -> tuple[bool, bool]:
    opaque = False
    for field_index in FIELDS:
        left, right = Residue(field_index), Residue(field_index)
        agree = left.of(first) == right.of(second)
        opaque = left.opaque or right.opaque
        if not agree:
            return False, opaque
    return True, opaque


def _equal_numerically(first: Node, second: Node) -> bool:
    names = sorted(variable_names(first) | variable_names(second))
    samples = [_sample(names, start, width) for start, width in _SAMPLES] if names else [{}]
    for values in samples:
        if not _close(first, second, values, machine_context(), _MACHINE_TOLERANCE):
            return False
    return all(_close(first, second, values, precise_context(), _PRECISE_TOLERANCE) for values in samples)


def _close(first: Node, second: Node, values: dict[str, float], context: object, tolerance: float) -> bool:
    left, right = evaluate(first, context, values), evaluate(second, context, values)
    largest = max(abs(left), abs(right))
    if left == 0 or right == 0:
        return largest < tolerance
    return abs(left - right) <= tolerance * largest


def _sample(names: list[str], start: float, width: float) -> dict[str, float]:
    return {name: start + width * (zlib.crc32(name.encode(errors="surrogatepass")) % 9973) / 9973 for name in names}


def variable_names(node: Node) -> frozenset[str]:
    """The names of the variables in a tree."""
    if node.kind == "variable":
        return frozenset((node.value,))
    return frozenset().union(*(variable_names(child) for child in node.children)) if node.children else frozenset()


def real_value(node: Node) -> float | None:
    """A machine number near a real constant (infinite for ±∞), None for anything else."""
    if node.kind == "constant" and node.value == "infinity":
        return float("inf")
    if node.kind == "neg" and node.children[0] == Node("constant", (), "infinity"):
        return float("-inf")
    try:
        value = complex(evaluate(node, machine_context(), {}))
    except _NO_VALUE:
        return None
    return value.real if abs(value.imag) < 1e-12 else None
