"""No three in line: the most points of an n x n grid with no three on any straight line (Dudeney, 1917)."""

from __future__ import annotations

from functools import partial
from math import gcd

from veritune.discovery.problem import BestKnown, CandidateFault, Problem, first_duplicates, integer_rows
from veritune.discovery.problems import require_size

_TWO_PER_ROW_KNOWN = {*range(2, 47), 48, 50, 52}
_LARGEST_SIDE = 1000


def build(dimension: int) -> Problem:
    """The problem on a grid of side `dimension`, 2 to 1000."""
    require_size("no_three_in_line", dimension, 2, _LARGEST_SIDE)
    bound, why = 2 * dimension, "two for each row of the grid"
    best_known = BestKnown(bound, "1998", "Flammenkamp, Progress in the no-three-in-line problem, II")
    read = partial(integer_rows, columns=2, noun="point", at_least=1, at_most=bound, why_at_most=why)

    def check(points: list[list[int]]) -> tuple[int, str]:
        for index, point in enumerate(points):
            if not all(0 <= x < dimension for x in point):
                raise CandidateFault(f"point {index} is {point}; coordinates must lie between 0 and {dimension - 1}")
        if duplicates := first_duplicates([tuple(point) for point in points]):
            raise CandidateFault("points {} and {} are duplicates".format(*duplicates))
        _refuse_collinear(points)
        return len(points), f"{len(points)} points of the {dimension} x {dimension} grid, no three in line"

    return Problem(
        name="no_three_in_line",
        dimension=dimension,
        statement=(
            f"Place as many points as possible on the {dimension} x {dimension} grid so that no three of them lie on "
            "one straight line of any slope. The score is the number of points."
        ),
        schema=f"a list of distinct points, each a list of two integers between 0 and {dimension - 1}",
        goal="maximize",
        bound=bound,
        bound_source="pigeonhole: two for each row",
        best_known=best_known if dimension in _TWO_PER_ROW_KNOWN else None,
        depth=2,
        read=read,
        check=check,
    )


def _refuse_collinear(points: list[list[int]]) -> None:
    """Raises on three in line: from each of the distinct points, no direction may occur twice."""
    for i, (x, y) in enumerate(points):
        seen: dict[tuple[int, int], int] = {}
        for j in range(i + 1, len(points)):
            dx, dy = points[j][0] - x, points[j][1] - y
            divisor = gcd(dx, dy)
            if (dx, dy) < (0, 0):
                divisor = -divisor
            direction = (dx // divisor, dy // divisor)
            if direction in seen:
                raise CandidateFault(f"points {i}, {seen[direction]} and {j} lie on one line")
            seen[direction] = j
