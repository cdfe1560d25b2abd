"""The expression tree: one node type, compared by value."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple


class Node(NamedTuple):
    """`kind` names the operation; `children` are its operands; `value` holds what is not a tree (a number, a name).

    >>> Node("add", (number(2), variable("x")))
    """

    kind: str
    children: tuple[Node, ...] = ()
    value: Any = None


def number(value: int | Fraction) -> Node:
    """A plain number."""
    return Node("number", (), value)


def variable(name: str) -> Node:
    """A variable; its subscript and primes are part of its name."""
    return Node("variable", (), name)


def constant(name: str) -> Node:
    """One of "pi", "e", "i", "infinity", or "set R" for \\mathbb{R}."""
    return Node("constant", (), name)
