"""Whether two scalar expressions have one value: exactly, then modulo primes, then at points with many digits."""

from __future__ import annotations

import cmath

from veritune.grading.math.agreement import agree
from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.modular import FIELDS, Residue
from veritune.grading.math.nodes import Node
from veritune.grading.math.numeric import NO_VALUE, NOT_TOLD, compiled, precise_context


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
        same, opaque, seed = _compare_residues(first, second)
    except (InexactError, ZeroDivisionError, TooLargeError):
        return False
    if same or not opaque:
        return same
    return agree(first, second, sorted(variable_names(first) | variable_names(second)), seed)


def _compare_residues(first: Node, second: Node) -> tuple[bool, bool, int]:
    """Whether the residues agree, whether one was opaque, and a number drawn from both trees alike."""
    opaque, seed = False, 0
    for field_index in FIELDS:
        left, right = Residue(field_index), Residue(field_index)
        a, b = left.of(first), right.of(second)
        opaque, seed = left.opaque or right.opaque, a ^ b
        if a != b:
            return False, opaque, seed
    return True, opaque, seed


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
    for context in (cmath, None):
        try:
            value = compiled(node, context or precise_context(60))
            if callable(value):
                return None  # it has variables
            value = complex(value)
        except NO_VALUE:
            return None
        except NOT_TOLD:
            continue
        return value.real if abs(value.imag) < 1e-12 else None
    return None
