"""Cap sets: the largest subset of F_3^n without three distinct points on a line, that is with x + y + z = 0."""

from __future__ import annotations

from functools import partial

import numpy as np

from veritune.discovery.problem import BestKnown, CandidateFault, Problem, first_duplicates, integer_rows
from veritune.discovery.problems import literature, require_size

_LARGEST_EXACT = 6
"""The dimension up to which the size of the largest cap is known."""
_LARGEST_DIMENSION = 12


def build(dimension: int) -> Problem:
    """The cap set problem in F_3^dimension, 1 to 12."""
    require_size("cap_set", dimension, 1, _LARGEST_DIMENSION)
    known, exact = literature("cap_set", dimension), min(dimension, _LARGEST_EXACT)
    # A cap of F_3^n meets each of three parallel hyperplanes in a cap of F_3^(n - 1).
    bound = literature("cap_set", exact)["best"][0] * 3 ** (dimension - exact)
    read = partial(
        integer_rows, columns=dimension, noun="point", at_least=1, at_most=bound,
        why_at_most=f"the proven upper bound in dimension {dimension}",
    )  # fmt: skip

    def check(points: list[list[int]]) -> tuple[int, str]:
        for index, point in enumerate(points):
            if any(x not in (0, 1, 2) for x in point):
                raise CandidateFault(f"point {index} is {point}; every coordinate must be 0, 1 or 2")
        if duplicates := first_duplicates([tuple(point) for point in points]):
            raise CandidateFault("points {} and {} are duplicates".format(*duplicates))
        _refuse_lines(np.array(points, dtype=np.int64))
        return len(points), f"{len(points)} points of F_3^{dimension}, no three on a line"

    return Problem(
        name="cap_set",
        dimension=dimension,
        statement=(
            f"Find a cap set in F_3^{dimension}, as large as possible: a set of distinct vectors with coordinates in "
            "{0, 1, 2} of which no three distinct ones sum to the zero vector modulo 3. The score is its size."
        ),
        schema=f"a list of points, each a list of {dimension} integers that are 0, 1 or 2",
        goal="maximize",
        bound=bound,
        bound_source="exact value" if dimension == exact else "three caps of the dimension below, from 112 in F_3^6",
        best_known=BestKnown(*known["best"]) if known else None,
        depth=2,
        read=read,
        check=check,
    )


def _refuse_lines(points: np.ndarray) -> None:
    """Raises on three that sum to zero; `points` is (n, dimension) over {0, 1, 2}, without duplicates."""
    powers = 3 ** np.arange(points.shape[1])
    codes = points @ powers
    holder = np.full(3 ** points.shape[1], -1)
    holder[codes] = np.arange(len(codes))
    for index, point in enumerate(points):
        # The third point of the line through x and y is -(x + y); for y = x that is x itself.
        thirds = holder[(-(point + points[:index]) % 3) @ powers]
        if (thirds >= 0).any():
            other = int(np.flatnonzero(thirds >= 0)[0])
            i, j, k = sorted((index, other, int(thirds[other])))
            raise CandidateFault(f"points {i}, {j} and {k} lie on one line: they sum to zero modulo 3")
