"""Whether two trees are one mathematical object: number, tuple, set, matrix, equation, inequality, interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.expressions import equal_expressions, variable_names
from veritune.grading.math.intervals import equal_regions, region
from veritune.grading.math.nodes import Node, constant, is_plain_integer, number

_SCALARS = frozenset(
    [
        "number",
        "variable",
        "neg",
        "add",
        "mul",
        "juxtapose",
        "div",
        "mixed",
        "percent",
        "degrees",
        "pow",
        "root",
        "abs",
        "factorial",
        "binomial",
        "function",
        "decorated",
    ]
)
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
MAX_UNORDERED = 64
Item = TypeVar("Item")


def equal_trees(first: Node, second: Node) -> bool:
    """Whether two trees denote the same object. Symmetric; False where that is not decided."""
    if first == second:
        return True
    first, second = _simplified(first), _simplified(second)
    if first.kind in _SCALARS and second.kind in _SCALARS:
        return equal_expressions(first, second)
    if first.kind == second.kind:
        comparison = _COMPARISONS.get(first.kind)
        if comparison is not None and comparison(first, second):
            return True
    elif {first.kind, second.kind} == {"matrix", "tuple"}:
        return _vector_is_tuple(first, second) if first.kind == "matrix" else _vector_is_tuple(second, first)
    elif first.kind in _SCALARS or second.kind in _SCALARS:
        return _scalar_is_other(first, second)
    names = {name.lower() for name in variable_names(first)}, {name.lower() for name in variable_names(second)}
    if all(names) and names[0] != names[1]:
        return False
    left, right = region(first), region(second)
    return left is not None and right is not None and equal_regions(left, right)


def _scalar_is_other(first: Node, second: Node) -> bool:
    """e and π are constants, and a constant may equal an expression; a set of one number is that number."""
    both = (first, second)
    if "set" in (first.kind, second.kind):
        members, scalar = (first, second) if first.kind == "set" else (second, first)
        return len(members.children) == 1 and equal_trees(members.children[0], scalar)
    if any(node.kind not in _SCALARS and node.kind != "constant" for node in both):
        return False
    infinite = constant("infinity")
    if infinite in both or Node("neg", (infinite,)) in both:
        return False
    return equal_expressions(first, second)


def _simplified(node: Node) -> Node:
    if node.kind in ("juxtapose", "mul", "neg", "div"):
        return _scaled_matrix(node)
    if node.kind == "tuple" and all(child.kind == "tuple" for child in node.children):
        if len({len(child.children) for child in node.children}) == 1 and node.value == "[]":
            return Node("matrix", tuple(Node("row", child.children) for child in node.children))
    elif node.kind == "member":
        return node.children[1]
    elif node.kind == "decorated" and node.value == "vec":
        return node.children[0]
    return node


def _scaled_matrix(node: Node) -> Node:
    """A number times a matrix as the matrix of the products."""
    positions = [index for index, child in enumerate(node.children) if child.kind == "matrix"]
    if len(positions) != 1 or (node.kind == "div" and positions != [0]):
        return node
    (position,) = positions
    before, after = node.children[:position], node.children[position + 1 :]

    def entry(value: Node) -> Node:
        return Node(node.kind, (*before, value, *after), node.value)

    matrix = node.children[position]
    return Node("matrix", tuple(Node("row", tuple(entry(value) for value in row.children)) for row in matrix.children))


def _vector_is_tuple(matrix: Node, other: Node) -> bool:
    rows = matrix.children
    if other.value != "()" or (len(rows) > 1 and len(rows[0].children) > 1):
        return False
    entries = [value for row in rows for value in row.children]
    return _equal_in_order(entries, other.children)


def _equal_in_order(first: Sequence[Node], second: Sequence[Node]) -> bool:
    return len(first) == len(second) and all(equal_trees(a, b) for a, b in zip(first, second, strict=True))


def match_unordered(first: Sequence[Item], second: Sequence[Item], same: Callable[[Item, Item], bool]) -> bool:
    """Whether the items of one sequence can be paired with the equal items of the other; quadratic, hence capped."""
    if len(first) != len(second) or len(first) > MAX_UNORDERED:
        return False
    rest = list(second)
    for item in first:
        for index, candidate in enumerate(rest):
            if same(item, candidate):
                del rest[index]
                break
        else:
            return False
    return True


def _equal_sets(first: Node, second: Node) -> bool:
    """Whether each member of one equals a member of the other, however often it is written."""
    if max(len(first.children), len(second.children)) > MAX_UNORDERED:
        return False
    matched: set[int] = set()
    for member in first.children:
        partner = next((i for i, other in enumerate(second.children) if equal_trees(member, other)), None)
        if partner is None:
            return False
        matched.add(partner)
    rest = [other for index, other in enumerate(second.children) if index not in matched]
    return all(any(equal_trees(member, other) for member in first.children) for other in rest)


def _equal_tuples(first: Node, second: Node) -> bool:
    return first.value == second.value and _equal_in_order(first.children, second.children)


def _equal_relations(first: Node, second: Node) -> bool:
    """Chains read from either end; a single equation or inequality also up to a factor (positive for inequalities)."""
    if len(first.children) != len(second.children):
        return False
    if first.value == second.value and _equal_in_order(first.children, second.children):
        return True
    mirrored = tuple(_MIRRORED[operator] for operator in reversed(second.value))
    if first.value == mirrored and _equal_in_order(first.children, second.children[::-1]):
        return True
    if len(first.value) != 1:
        return False
    if first.value[0] == second.value[0]:
        return _proportional(_difference(first), _difference(second), signed=first.value[0] not in ("=", "!="))
    if first.value[0] == _MIRRORED[second.value[0]]:
        return _proportional(_difference(first), Node("neg", (_difference(second),)), signed=True)
    return False


def _difference(relation: Node) -> Node:
    left, right = relation.children
    return left if right == number(0) else Node("add", (left, Node("neg", (right,))))


_SAMPLE_POINTS = ((2, 5), (-3, 7), (11, -4))


def _proportional(first: Node, second: Node, signed: bool) -> bool:
    """Whether first = c * second for a rational constant c (positive where `signed`), found at one rational point."""
    if first.kind not in _SCALARS or second.kind not in _SCALARS:
        return False
    names = sorted(variable_names(first) | variable_names(second))
    if not names or variable_names(first) != variable_names(second):
        return False
    for start, step in _SAMPLE_POINTS:
        point = {name: number(start + step * index) for index, name in enumerate(names)}
        try:
            left, right = exact_value(_substitute(first, point)), exact_value(_substitute(second, point))
        except (InexactError, TooLargeError, ZeroDivisionError):
            return False
        if left == 0 or right == 0:
            continue
        if signed and (left > 0) != (right > 0):
            return False
        scaled = Node("mul", (number(left), second))
        return equal_expressions(Node("mul", (number(right), first)), scaled)
    return False


def _substitute(node: Node, values: dict[str, Node]) -> Node:
    if node.kind == "variable":
        return values[node.value]
    if not node.children:
        return node
    return Node(node.kind, tuple(_substitute(child, values) for child in node.children), node.value)


def _equal_unions(first: Node, second: Node) -> bool:
    return match_unordered(first.children, second.children, equal_trees)


_COMPARISONS: dict[str, Callable[[Node, Node], bool]] = {
    "tuple": _equal_tuples,
    "set": _equal_sets,
    "matrix": lambda first, second: _equal_in_order(first.children, second.children),
    "row": lambda first, second: _equal_in_order(first.children, second.children),
    "relation": _equal_relations,
    "union": _equal_unions,
    "intersection": _equal_unions,
    "difference": lambda first, second: _equal_in_order(first.children, second.children),
    "member": lambda first, second: _equal_in_order(first.children, second.children),
    "numeral": lambda first, second: first == second,
}


def sign_choices(node: Node) -> list[Node]:
    """`2 ± x` as [2 + x, 2 - x]; every ± of one tree takes the same sign, and ∓ the other."""
    if not has_sign_choice(node):
        return [node]
    return [_choose(node, plus=True), _choose(node, plus=False)]


def has_sign_choice(node: Node) -> bool:
    """Whether ± or ∓ stands anywhere in the tree."""
    return node.kind == "sign choice" or any(has_sign_choice(child) for child in node.children)


def _choose(node: Node, plus: bool) -> Node:
    children = tuple(_choose(child, plus) for child in node.children)
    if node.kind == "sign choice":
        return children[0] if plus == (node.value == "pm") else Node("neg", children)
    return Node(node.kind, children, node.value)


def has_unevaluated_operation(node: Node) -> bool:
    """Whether the tree still adds, multiplies or raises two plain numbers: `2+2`, `3 \\cdot 4`, `2^{10}`.

    A fraction, a mixed number, a power of ten and scientific notation are ways to write one number.
    """
    if node.kind == "number" or not node.children:
        return False
    plain = [is_plain_number(child) for child in node.children]
    if node.kind == "pow":
        return all(plain) and node.children[0] != number(10) and is_plain_integer(node.children[1])
    if node.kind in ("mul", "juxtapose"):
        last = node.children[-1]
        scientific = len(plain) == 2 and plain[0] and last.kind == "pow" and last.children[0] == number(10)
        if not scientific and sum(map(_is_plain_operand, node.children)) > 1:
            return True
    elif (node.kind == "add" and sum(map(_is_plain_operand, node.children)) > 1) or (
        node.kind == "binomial" and all(plain)
    ):
        return True
    return any(has_unevaluated_operation(child) for child in node.children)


def _is_plain_operand(node: Node) -> bool:
    """A plain number, or a power or factorial of plain numbers."""
    if node.kind in ("pow", "factorial"):
        return all(is_plain_number(child) for child in node.children)
    return is_plain_number(node)


def is_plain_number(node: Node) -> bool:
    """Whether the tree is one number as people write it: an integer, decimal, fraction or mixed number with a sign."""
    if node.kind in ("neg", "percent"):
        return is_plain_number(node.children[0])
    if node.kind in ("div", "mixed"):
        return all(
            child.kind == "number" or (child.kind == "div" and is_plain_number(child)) for child in node.children
        )
    return node.kind == "number"


def is_unreduced_fraction(node: Node) -> bool:
    """Whether the tree is a fraction of integers that is not in lowest terms."""
    if node.kind == "neg":
        return is_unreduced_fraction(node.children[0])
    if node.kind != "div" or any(child.kind != "number" for child in node.children):
        return False
    top, bottom = (child.value for child in node.children)
    if not isinstance(top, int) or not isinstance(bottom, int) or bottom == 0:
        return False
    value = exact_value(node)
    return (abs(top), abs(bottom)) != (abs(value.numerator), value.denominator)
