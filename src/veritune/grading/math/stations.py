"""The points at which expressions are compared: general ones, and those around the kinks and poles that they state."""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

from veritune.grading.math.nodes import Node, is_plain_integer, number
from veritune.grading.math.numeric import NO_VALUE, NOT_TOLD, compiled

Point = dict[str, float]
Height = Callable[[float], float | None]

_RATIONAL = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, 1.5, -2.5, 10.0, -10.0, 7.0, -12.0, 100.0, -64.0, 0.125)
_MAGNITUDES = (
    ((1e3, 1e5),)  # the largest first: they tell most functions apart
    + ((40.0, 1e3),) * 4
    + ((8.0, 40.0),) * 4
    + ((0.5, 8.0),) * 9
    + ((0.05, 1.0),) * 4
    + ((1e-3, 0.05),)
)
_MAX_ARGUMENTS = 64
_MAX_STATIONS = 48
_MAX_CHANGES = 6  # of sign, for one argument
_BISECTIONS = 28
_TOUCHING = 1e-9
_GOLDEN = 0.618
_GRID = (
    -1e6,
    -1e5,
    -1e4,
    -1e3,
    -120.0,
    -45.0,
    *range(-24, -6, 3),
    *(step / 2 for step in range(-12, 13)),
    *range(7, 25, 3),
    45.0,
    120.0,
    1e3,
    1e4,
    1e5,
    1e6,
)
_UNKNOWN = (*NO_VALUE, *NOT_TOLD)


class Line(NamedTuple):
    """The points at which one variable takes every value and the others stay."""

    name: str
    others: Point

    def at(self, value: float) -> Point:
        return {**self.others, self.name: value}


def general_points(names: list[str], generator: random.Random) -> Iterator[tuple[Point, str]]:
    """60 points with their role: "random" ones of both signs from 0.001 to 100,000, and "rational" ones.

    The first three are neither small nor large.
    """
    yield from ((_moderate(names, generator, signs), "random") for signs in ((1,), (-1,), (1, -1)))
    random_columns = [_random_values(generator) for _ in names]
    rational_columns = [list(_RATIONAL) for _ in names]
    for column in (*random_columns[1:], *rational_columns[1:]):
        generator.shuffle(column)  # so that variables are of different sizes and signs
    for columns, role in ((random_columns, "random"), (rational_columns, "rational")):
        yield from ((dict(zip(names, values, strict=True)), role) for values in zip(*columns, strict=True))


def _moderate(names: list[str], generator: random.Random, signs: tuple[int, ...]) -> Point:
    return {name: generator.choice(signs) * generator.uniform(0.3, 4) for name in names}


def _random_values(generator: random.Random) -> list[float]:
    return [sign * low * (high / low) ** generator.random() for low, high in _MAGNITUDES for sign in (1, -1)]


def critical_arguments(*trees: Node) -> list[Node]:
    """The expressions at whose zeros one of the trees may have a kink, a pole or an end of its domain."""
    found: dict[Node, None] = {}
    for tree in trees:
        _collect(tree, found)
    return list(found)[:_MAX_ARGUMENTS]


def _collect(node: Node, found: dict[Node, None]) -> None:
    for child in node.children:
        _collect(child, found)
    for argument in _critical(node):
        for factor in _factors(argument):
            if _has_variable(factor):
                found[factor] = None


def _critical(node: Node) -> tuple[Node, ...]:
    name = node.value if node.kind == "function" else node.kind
    if name in ("abs", "root", "pow"):
        is_power = name == "pow" and is_plain_integer(node.children[1]) and node.children[1].value > 0
        return () if is_power else node.children[:1]
    if name == "log":
        return node.children
    if name == "div":
        return node.children[1:]
    if name in ("arcsin", "arccos", "arcsec", "arccsc", "floor", "ceil"):
        return tuple(_plus(node.children[0], shift) for shift in (-1, 0, 1))
    if name in ("max", "min"):
        return tuple(Node("add", (one, Node("neg", (other,)))) for one, other in combinations(node.children[:8], 2))
    return ()


def _factors(node: Node) -> list[Node]:
    """What is zero where a product, a power or a quotient is."""
    if node.kind in ("mul", "juxtapose", "neg"):
        return [factor for child in node.children for factor in _factors(child)]
    return _factors(node.children[0]) if node.kind in ("pow", "div") else [node]


def _plus(node: Node, shift: int) -> Node:
    return Node("add", (node, number(shift))) if shift else node


def _has_variable(node: Node, name: str | None = None) -> bool:
    if node.kind == "variable":
        return name is None or node.value == name
    return any(_has_variable(child, name) for child in node.children)


def lines(names: list[str], arguments: list[Node], generator: random.Random) -> Iterator[Line]:
    """The one line of one variable; for several, two along each that stands in an argument."""
    for name in names[:6]:
        if any(_has_variable(argument, name) for argument in arguments):
            for _ in range(2 if len(names) > 1 else 1):
                yield Line(name, _moderate([other for other in names if other != name], generator, (1, -1)))


def stations_on(line: Line, arguments: list[Node], generator: random.Random) -> Iterator[tuple[Point, str]]:
    """Points with their role: a "cell" between two zeros of the arguments, "near" one, or the "station" itself."""
    on_line = [argument for argument in arguments if _has_variable(argument, line.name)]
    found = sorted({zero for argument in on_line for zero in _zeros(argument, line) if abs(zero) < 1e9})
    found = found[:: 1 + len(found) // _MAX_STATIONS]
    if not found:
        return
    yield line.at(found[0] - generator.uniform(0.2, 2)), "cell"
    yield line.at(found[-1] + generator.uniform(0.2, 2)), "cell"
    for low, high in pairwise(found):
        yield line.at(low + generator.uniform(0.2, 0.8) * (high - low)), "cell"
    for zero in found:
        for distance in (1e-4, 0.03):
            step = distance * (1 + abs(zero)) * generator.uniform(0.5, 1)
            yield line.at(zero + step), "near"
            yield line.at(zero - step), "near"
        yield line.at(zero), "station"


def _zeros(argument: Node, line: Line) -> list[float]:
    """Exactly those of a linear or quadratic argument, also a double one; of another, those where its sign changes."""
    try:
        function = compiled(argument, cmath)
    except _UNKNOWN:
        return []

    def height(value: float) -> float | None:
        try:
            result = function(line.at(value))
        except _UNKNOWN:
            return None
        return result.real if abs(result.imag) < 1e-9 and math.isfinite(result.real) else None

    samples = [sample for value in (-1.0, 0.0, 1.0, 3.0) if (sample := height(value)) is not None]
    if len(samples) == 4 and not _bends(argument):
        before, middle, after, far = samples
        linear, square = (after - before) / 2, (after + before) / 2 - middle
        scale = abs(middle) + abs(linear) + abs(square)
        if abs(middle + 3 * linear + 9 * square - far) <= 1e-11 * scale:
            return _quadratic_zeros(square, linear, middle, scale)
    return _changes_of_sign(height)


def _bends(node: Node) -> bool:
    return node.kind in ("abs", "root", "function") or any(map(_bends, node.children))


def _quadratic_zeros(square: float, linear: float, middle: float, scale: float) -> list[float]:
    if abs(square) <= 1e-12 * scale:
        return [-middle / linear] if linear else []
    discriminant = linear * linear - 4 * square * middle
    if abs(discriminant) <= 1e-9 * linear * linear:
        return [-linear / (2 * square)]
    if discriminant < 0:
        return []
    larger = -(linear + math.copysign(math.sqrt(discriminant), linear)) / 2
    return [larger / square, middle / larger]


def _changes_of_sign(height: Height) -> list[float]:
    """Where a function crosses zero between the values of the grid, or dips to zero there."""
    known = [(value, found) for value in _GRID if (found := height(value)) is not None]
    lowest = [
        _lowest(height, low, high, middle_height > 0)
        for (low, before), (_, middle_height), (high, after) in zip(known, known[1:], known[2:], strict=False)
        if (before > 0) == (middle_height > 0) == (after > 0) and abs(middle_height) < min(abs(before), abs(after))
    ]
    known = sorted([*known, *((value, found) for value in lowest if (found := height(value)) is not None)])
    pairs = [
        (low, high, below)
        for (low, below), (high, above) in pairwise(known)
        if abs(below) < _TOUCHING or (above and (below < 0) != (above < 0))
    ]
    return [
        low if abs(below) < _TOUCHING else _bisected(height, low, high, below < 0)
        for low, high, below in pairs[:: 1 + len(pairs) // _MAX_CHANGES]
    ]


def _lowest(height: Height, low: float, high: float, is_positive: bool) -> float:
    """Where a function that dips between two values crosses zero or is nearest to it, by golden sections."""
    for _ in range(_BISECTIONS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = height(left), height(right)
        if at_left is None or at_right is None:
            break
        if (at_left > 0) != is_positive:
            return left
        if abs(at_left) < abs(at_right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _bisected(height: Height, low: float, high: float, rises: bool) -> float:
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = height(middle)
        if found is None:
            break
        if (found < 0) == rises:
            low = middle
        else:
            high = middle
    return (low + high) / 2
