"""Kissing numbers: how many unit spheres can touch one, in d dimensions.

A set C of nonzero integer vectors whose minimum distance is at least its maximum norm proves kissing number >= |C|:
for |x| <= |y| <= |x - y| the angle between x and y is at least 60 degrees.
"""

from __future__ import annotations

from functools import partial

from veritune.discovery.distances import minimum_squared_distance, squared_norm
from veritune.discovery.problem import BestKnown, CandidateFault, Problem, first_duplicates, integer_rows
from veritune.discovery.problems import literature, require_size

_LARGEST_DIMENSION = 64
"""Beyond the literature the bound below is astronomically weak, and candidates are too large to compare pairwise."""


def build(dimension: int) -> Problem:
    """The kissing problem in `dimension`, 1 to 64; beyond 24 the upper bound is the elementary 3**d - 1."""
    require_size("kissing", dimension, 1, _LARGEST_DIMENSION)
    known = literature("kissing", dimension)
    # Spheres of radius 1/2 about the points of contact, and the central one, lie within radius 3/2.
    bound = known.get("bound", 3**dimension - 1)
    read = partial(
        integer_rows, columns=dimension, noun="point", at_least=2, at_most=bound,
        why_at_most=f"the proven upper bound in dimension {dimension}",
    )  # fmt: skip
    return Problem(
        name="kissing",
        dimension=dimension,
        statement=(
            f"Find a set C of nonzero integer vectors in Z^{dimension}, as large as possible, such that the minimum of "
            "|x - y| over distinct x, y in C is at least the maximum of |x| over x in C. Such a set proves that the "
            f"kissing number in dimension {dimension} is at least |C|. The score is |C|. Everything is checked in "
            "exact integer arithmetic, so equality is allowed and rounding is not."
        ),
        schema=(
            f"a list of points, each a list of {dimension} integers of at most 256 bits; "
            "points are numbered from 0 in messages"
        ),
        goal="maximize",
        bound=bound,
        bound_source=known.get("bound_source", "elementary: volume of the ball of three times the radius"),
        best_known=BestKnown(*known["best"]) if known else None,
        depth=2,
        read=read,
        check=_check,
    )


def _check(points: list[list[int]]) -> tuple[int, str]:
    for index, point in enumerate(points):
        if not any(point):
            raise CandidateFault(f"point {index} is the zero vector; every point must be nonzero")
    norm = max(map(squared_norm, points))
    duplicates = first_duplicates([tuple(point) for point in points])
    distance, i, j = (0, *duplicates) if duplicates else minimum_squared_distance(points)
    if distance < norm:
        said = ": the two points are duplicates" if duplicates else ""
        raise CandidateFault(
            f"Minimum squared distance {distance} < maximum squared norm {norm} (points {i} and {j}){said}"
        )
    return len(points), f"{len(points)} points: minimum squared distance {distance} >= maximum squared norm {norm}"
