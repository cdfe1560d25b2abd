"""The exact minimum distance of integer points of any size, at the speed of floating-point matrix products.

Coordinates are cut into limbs of so few bits that every sum which a float64 matrix product forms stays an integer of
at most 2**53, where float64 is exact. The limbs of all squared distances are then carried into base-2**b digits and
compared digit by digit. No rounding happens anywhere, so no tolerance is needed.

Coordinates small enough for one limb, which those of lattices are, take a shorter way: the product of two matrices is
the squared distances themselves, in float32 where 24 bits hold every sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

_EXACT_FLOAT_INTEGERS, _EXACT_FLOAT32_INTEGERS = 2**53, 2**24
_TILE_ROWS, _TILE_COLUMNS = 256, 512
"""Squared distances held at once where they take one limb: half a megabyte, which stays in the processor's cache."""
_BLOCK_ELEMENTS = 100_000
"""Digits held at once: they stay in the processor's cache, and memory stays bounded however many points there are."""


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
    largest = max(map(abs, chain.from_iterable(points)))
    largest_sum = 4 * len(points[0]) * largest**2  # of a squared distance and of every partial sum on the way to it
    if largest_sum <= _EXACT_FLOAT_INTEGERS:
        number_type = np.float32 if largest_sum <= _EXACT_FLOAT32_INTEGERS else np.float64
        value, i, j = _minimum_of_one_limb(np.array(points, dtype=number_type))
    else:
        value, i, j = _minimum_of_limbs(points, largest.bit_length())
    return value * divisor**2, i, j


def _minimum_of_one_limb(points: np.ndarray) -> tuple[int, int, int]:
    """|x - y|^2 is the inner product of (-2x, |x|^2, 1) and (y, 1, |y|^2); `points` is (n, dimension)."""
    norms, ones = (points * points).sum(axis=1, keepdims=True), np.ones((len(points), 1), dtype=points.dtype)
    left = np.hstack([-2 * points, norms, ones])
    right = np.ascontiguousarray(np.hstack([points, ones, norms]).T)
    best = (math.inf, 0, 0)
    memory = np.empty((_TILE_ROWS, _TILE_COLUMNS), dtype=points.dtype)
    for row in range(0, len(points), _TILE_ROWS):
        for column in range(row, len(points), _TILE_COLUMNS):
            rows, columns = left[row : row + _TILE_ROWS], right[:, column : column + _TILE_COLUMNS]
            tile = np.matmul(rows, columns, out=memory[: rows.shape[0], : columns.shape[1]])
            if column < row + _TILE_ROWS:  # i < j alone counts
                tile[np.arange(len(rows))[:, None] + row >= np.arange(columns.shape[1]) + column] = math.inf
            least = tile.min()
            if least < best[0] or (least == best[0] and best[1] > row):
                i, j = divmod(int(np.flatnonzero(tile == least)[0]), columns.shape[1])
                best = min(best, (float(least), row + i, column + j))
    return int(best[0]), best[1], best[2]


def _minimum_of_limbs(points: Sequence[Sequence[int]], bits: int) -> tuple[int, int, int]:
    dimension = len(points[0])
    width = _limb_width(bits, dimension)
    limbs = _split(points, bits, width)
    places = 2 * len(limbs) - 1
    norms = [
        sum((limbs[a] * limbs[k - a]).sum(axis=1) for a in range(len(limbs)) if 0 <= k - a < len(limbs))
        for k in range(places)
    ]
    block = max(1, _BLOCK_ELEMENTS // (len(points) * (places + 1)))
    best: tuple[int, int, int] | None = None
    for start in range(0, len(points) - 1, block):
        found = _block_minimum(limbs, norms, width, start, min(start + block, len(points)))
        if best is None or found < best:
            best = found
    assert best is not None
    return best


def _limb_width(bits: int, dimension: int) -> int:
    """The widest limb for which 4 * dimension * limbs * 2**(2 * width) stays exact in float64.

    A squared distance's k-th limb sum is norm_i + norm_j - 2 * gram, and each of the four terms is at most
    dimension * limbs * 2**(2 * width) in absolute value, partial sums included.
    """
    for width in range(min(bits, 25), 0, -1):
        limbs = -(-bits // width)
        if 4 * dimension * limbs * 4**width <= _EXACT_FLOAT_INTEGERS:
            return width
    raise ValueError(f"dimension {dimension} with {bits}-bit coordinates leaves no exact limb width")


def _split(points: Sequence[Sequence[int]], bits: int, width: int) -> list[np.ndarray]:
    """Limbs, least significant first, each (n, dimension) float64 and carrying its coordinate's sign."""
    mask = 2**width - 1
    signs = np.array([[-1 if x < 0 else 1 for x in point] for point in points], dtype=np.float64)
    return [
        signs * np.array([[(abs(x) >> shift) & mask for x in point] for point in points], dtype=np.float64)
        for shift in range(0, bits, width)
    ]


def _block_minimum(
    limbs: list[np.ndarray], norms: list[np.ndarray], width: int, start: int, stop: int
) -> tuple[int, int, int]:
    """The minimum over pairs i < j with start <= i < stop."""
    digits: list[np.ndarray] = []
    top = np.zeros((stop - start, len(norms[0]) - start), dtype=np.int64)  # (rows, columns)
    for place, norm in enumerate(norms):
        if place > 0:  # the place below passes its carry on and keeps a canonical digit
            digits.append(top & (2**width - 1))
            top >>= width
        gram = sum(
            limbs[a][start:stop] @ limbs[place - a][start:].T for a in range(len(limbs)) if 0 <= place - a < len(limbs)
        )
        top += (norm[start:stop, None] + norm[None, start:] - 2 * gram).astype(np.int64)
    top[np.tril_indices_from(top)] = np.iinfo(np.int64).max  # i < j alone counts
    remaining = np.flatnonzero(top == top.min())
    for digit in reversed(digits):
        values = digit.ravel()[remaining]
        remaining = remaining[values == values.min()]
    first = int(remaining[0])
    value = int(top.ravel()[first])
    for digit in reversed(digits):
        value = (value << width) + int(digit.ravel()[first])
    row, column = divmod(first, top.shape[1])
    return value, start + row, start + column
