"""Subsets of the real line: intervals, unions, inequalities and excluded points in one form, so that they compare."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from veritune.grading.math.expressions import equal_expressions, real_value
from veritune.grading.math.nodes import Node, constant, number

INFINITY = constant("infinity")
MINUS_INFINITY = Node("neg", (INFINITY,))
_MAX_PIECES = 64


class Piece(NamedTuple):
    """An interval between two trees, with machine numbers near its ends for sorting."""

    low: Node
    high: Node
    low_closed: bool
    high_closed: bool
    low_value: float
    high_value: float


Region = list[Piece]


def region(node: Node) -> Region | None:
    """The pieces of a subset of the reals, sorted and merged; None where `node` is none that is read here."""
    pieces = _pieces(node)
    if pieces is None or len(pieces) > _MAX_PIECES:
        return None
    return _merged(pieces)


def equal_regions(first: Region, second: Region) -> bool:
    """Whether two regions have the same pieces: ends equal as expressions, and open or closed alike."""
    return len(first) == len(second) and all(_equal_pieces(a, b) for a, b in zip(first, second, strict=True))


def _equal_pieces(first: Piece, second: Piece) -> bool:
    return (
        (first.low_closed, first.high_closed) == (second.low_closed, second.high_closed)
        and _equal_ends(first.low, second.low)
        and _equal_ends(first.high, second.high)
    )


def _equal_ends(first: Node, second: Node) -> bool:
    return first == second or equal_expressions(first, second)


def _piece(low: Node, high: Node, low_closed: bool, high_closed: bool) -> Piece | None:
    low_value, high_value = real_value(low), real_value(high)
    if low_value is None or high_value is None or low_value > high_value:
        return None
    return Piece(
        MINUS_INFINITY if low_value == float("-inf") else low,
        INFINITY if high_value == float("inf") else high,
        low_closed,
        high_closed,
        low_value,
        high_value,
    )


def _pieces(node: Node) -> Region | None:
    if node.kind == "tuple" and len(node.children) == 2:
        return _listed(_piece(*node.children, node.value[0] == "[", node.value[1] == "]"))
    if node.kind == "set":
        points = [_piece(child, child, True, True) for child in node.children]
        return None if None in points else [point for point in points if point]
    if node.kind == "constant" and node.value == "set R":
        return [_whole_line()]
    if node.kind == "union":
        parts = [_pieces(child) for child in node.children]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or (node.value == "or" and _one_contains_another(known)):
            return None
        return [piece for part in known for piece in part]
    if node.kind == "intersection":
        return _intersection(_pieces(node.children[0]), _pieces(node.children[1]))
    if node.kind == "difference":
        return _without(_pieces(node.children[0]), _pieces(node.children[1]))
    if node.kind == "member":
        return _pieces(node.children[1])
    if node.kind == "relation":
        return _solution(node)
    return None


def _whole_line() -> Piece:
    return Piece(MINUS_INFINITY, INFINITY, False, False, float("-inf"), float("inf"))


def _listed(piece: Piece | None) -> Region | None:
    return None if piece is None else [piece]


def _solution(node: Node) -> Region | None:
    """The numbers that satisfy `x < 5`, `1 <= x < 5` or `x != 5`."""
    sides, operators = node.children, node.value
    if len(sides) == 2 and sides[0].kind == "abs":
        return _around(sides[0].children[0], operators[0], sides[1])
    variables = [index for index, side in enumerate(sides) if side.kind == "variable"]
    if len(variables) != 1 or "=" in operators:
        return None
    (position,) = variables
    if len(sides) == 3 and position == 1:
        rising = all(operator in ("<", "<=") for operator in operators)
        falling = all(operator in (">", ">=") for operator in operators)
        if rising:
            return _listed(_piece(sides[0], sides[2], operators[0] == "<=", operators[1] == "<="))
        return _listed(_piece(sides[2], sides[0], operators[1] == ">=", operators[0] == ">=")) if falling else None
    if len(sides) != 2:
        return None
    operator, bound = operators[0], sides[1 - position]
    if operator == "!=":
        point = _piece(bound, bound, True, True)
        return None if point is None else _without([_whole_line()], [point])
    below = (operator in ("<", "<=")) == (position == 0)
    closed = operator in ("<=", ">=")
    low, high = (MINUS_INFINITY, bound) if below else (bound, INFINITY)
    return _listed(_piece(low, high, closed and not below, closed and below))


def _around(inside: Node, operator: str, distance: Node) -> Region | None:
    """The numbers that satisfy `|x - 3| < 2`, and likewise for the other relations but `=`."""
    terms = inside.children if inside.kind == "add" else (inside,)
    variables = [term for term in terms if term.kind == "variable"]
    others = tuple(term for term in terms if term.kind != "variable")
    if len(variables) != 1 or (real_value(distance) or 0) <= 0 or operator in ("=", "!="):
        return None
    center = Node("neg", (Node("add", others),)) if others else number(0)
    closed = operator in ("<=", ">=")
    low, high = Node("add", (center, Node("neg", (distance,)))), Node("add", (center, distance))
    if operator in ("<", "<="):
        return _listed(_piece(low, high, closed, closed))
    sides = _piece(MINUS_INFINITY, low, False, closed), _piece(high, INFINITY, closed, False)
    return None if None in sides else [side for side in sides if side]


def _merged(pieces: Region) -> Region:
    merged: Region = []
    for piece in sorted(pieces, key=lambda piece: (piece.low_value, not piece.low_closed)):
        if piece.low_value == piece.high_value and not (piece.low_closed and piece.high_closed):
            continue
        last = merged[-1] if merged else None
        touching = last is not None and (
            piece.low_value < last.high_value
            or (piece.low_value == last.high_value and (piece.low_closed or last.high_closed))
        )
        if last is None or not touching:
            merged.append(piece)
        elif (piece.high_value, piece.high_closed) > (last.high_value, last.high_closed):
            merged[-1] = last._replace(high=piece.high, high_closed=piece.high_closed, high_value=piece.high_value)
    return merged


def _intersection(first: Region | None, second: Region | None) -> Region | None:
    if first is None or second is None or len(first) * len(second) > _MAX_PIECES:
        return None
    result: Region = []
    for a in first:
        for b in second:
            low = max(a, b, key=lambda piece: (piece.low_value, not piece.low_closed))
            high = min(a, b, key=lambda piece: (piece.high_value, piece.high_closed))
            if low.low_value <= high.high_value:
                result.append(
                    Piece(low.low, high.high, low.low_closed, high.high_closed, low.low_value, high.high_value)
                )
    return result


def _without(first: Region | None, second: Region | None) -> Region | None:
    """`first` minus the pieces of `second`, as an intersection with what lies outside each of them."""
    if second is None:
        return None
    for piece in second:
        outside: Region = []
        if piece.low_value != float("-inf"):
            low_end = Piece(MINUS_INFINITY, piece.low, False, not piece.low_closed, float("-inf"), piece.low_value)
            outside.append(low_end)
        if piece.high_value != float("inf"):
            high_end = Piece(piece.high, INFINITY, not piece.high_closed, False, piece.high_value, float("inf"))
            outside.append(high_end)
        first = _intersection(first, outside)
    return first


def intersection_of(nodes: tuple[Node, ...], alternatives: bool = False) -> Region | None:
    """Where all of several conditions hold (`x > 1 and x < 3`).

    None for `alternatives`, conditions that only a comma joins, of which one contains another.
    """
    regions = [_pieces(node) for node in nodes]
    known = [part for part in regions if part is not None]
    if len(known) < len(regions) or (alternatives and _one_contains_another(known)):
        return None
    result: Region | None = [_whole_line()]
    for part in known:
        result = _intersection(result, part)
    return None if result is None else _merged(result)


def _one_contains_another(regions: list[Region]) -> bool:
    """Whether two of them differ and one lies in the other: `x > 2 or x > 3` is two answers rather than a union."""
    if len(regions) > _MAX_PIECES:
        return True
    for first, second in combinations(map(_merged, regions), 2):
        both = _merged([*first, *second])
        if not equal_regions(first, second) and (equal_regions(both, first) or equal_regions(both, second)):
            return True
    return False
