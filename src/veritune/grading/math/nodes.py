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


def negate(node: Node) -> Node:
    """The negative of a tree; a plain number carries its own sign."""
    if node.kind == "number":
        return number(-node.value)
    return node.children[0] if node.kind == "neg" else Node("neg", (node,))


def letter(name: str) -> Node:
    """`e` and `i` are the constants, every other name a variable."""
    return constant(name) if name in ("e", "i") else variable(name)


def is_plain_integer(node: Node) -> bool:
    """Whether a tree is an integer as written."""
    return node.kind == "number" and isinstance(node.value, int)
