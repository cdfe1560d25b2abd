"""The exact minimum distance of integer points of any size, at the speed of floating-point matrix products.

Where the coordinates are so small that float64 (or float32) holds every sum that the product forms, which those of
lattices are, the product is the squared distances themselves. Where they are larger, it gives them up to an error
whose bound is proven, and every pair that may be the closest within that bound is measured again in Python's integers.
No result depends on a rounding, so no tolerance is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

_EXACT_FLOAT_INTEGERS, _EXACT_FLOAT32_INTEGERS = 2**53, 2**24
_TILE_ROWS, _TILE_COLUMNS = 256, 512
"""Squared distances held at once: at most a megabyte, which stays in the processor's cache."""


def squared_norm(point: Sequence[int]) -> int:
    """The exact squared Euclidean norm."""
    return sum(x * x for x in point)


def minimum_squared_distance(points: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """(d2, i, j): the exact minimum of |x_i - x_j|^2 over i < j, and the first pair in row order that attains it.

    `points` are n >= 2 rows of equally many Python integers.
    """
    divisor = math.gcd(*chain.from_iterable(points)) or 1
    if divisor > 1:
        points = [[x // divisor for x in point] for point in points]
    largest_sum = _largest_sum(points)
    if (
        largest_sum > _EXACT_FLOAT_INTEGERS
    ):  # points that crowd together far from the origin are small about one of them
        points = [[x - start for x, start in zip(point, points[0], strict=True)] for point in points]
        largest_sum = _largest_sum(points)
    value, i, j = _minimum(points, largest_sum)
    return value * divisor**2, i, j


def _largest_sum(points: Sequence[Sequence[int]]) -> int:
    """Bounds a squared distance, and the sum of the absolute values of all terms on the way to it."""
    return 4 * len(points[0]) * max(map(abs, chain.from_iterable(points))) ** 2


def _minimum(points: Sequence[Sequence[int]], largest_sum: int) -> tuple[int, int, int]:
    """|x - y|^2 is the inner product of (-2x, |x|^2, 1) and (y, 1, |y|^2), formed tile by tile.

    With u = 2**-53, a coordinate's rounding, the square's and that of any order of summation move a term by less than
    (dimension + 6) u of its size (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). `error` is
    twice that, which also covers the roundings of the comparisons.
    """
    is_exact = largest_sum <= _EXACT_FLOAT_INTEGERS
    error = 0.0 if is_exact else 2 * (len(points[0]) + 6) * 2.0**-53 * float(largest_sum)
    rows: np.ndarray = np.array(points, dtype=np.float32 if largest_sum <= _EXACT_FLOAT32_INTEGERS else np.float64)
    norms, ones = (rows * rows).sum(axis=1, keepdims=True), np.ones((len(rows), 1), dtype=rows.dtype)
    left = np.hstack([-2 * rows, norms, ones])
    right = np.ascontiguousarray(np.hstack([rows, ones, norms]).T)
    memory = np.empty((_TILE_ROWS, _TILE_COLUMNS), dtype=rows.dtype)
    best, bar = (_squared_distance(points, 0, 1), 0, 1), math.inf
    for row in range(0, len(points), _TILE_ROWS):
        for column in range(row, len(points), _TILE_COLUMNS):
            some, others = left[row : row + _TILE_ROWS], right[:, column : column + _TILE_COLUMNS]
            tile = np.matmul(some, others, out=memory[: some.shape[0], : others.shape[1]])
            if column < row + _TILE_ROWS:  # i < j alone counts
                tile[np.arange(len(some))[:, None] + row >= np.arange(others.shape[1]) + column] = math.inf
            least = float(tile.min())
            if least < bar or (least == bar and best[1] > row):
                near = np.flatnonzero(tile <= min(least + 2 * error, bar))
                for i, j in (divmod(int(place), others.shape[1]) for place in (near[:1] if is_exact else near)):
                    best = min(best, (_squared_distance(points, row + i, column + j), row + i, column + j))
                bar = best[0] + error
    return best


def _squared_distance(points: Sequence[Sequence[int]], i: int, j: int) -> int:
    return sum((x - y) ** 2 for x, y in zip(points[i], points[j], strict=True))
