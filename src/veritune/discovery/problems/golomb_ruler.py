"""Golomb rulers: n marks whose pairwise differences are all distinct, as short as possible."""

from __future__ import annotations

from veritune.discovery.problem import BestKnown, CandidateFault, Problem, first_duplicates, integer, sequence
from veritune.discovery.problems import require_size

# Lengths of optimal rulers with 2, 3, ... marks; the last ones were proven by distributed.net (27: 2014, 28: 2022).
_OPTIMAL = (
    1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216, 246, 283, 333, 356, 372, 425, 480, 492,
    553, 585,
)  # fmt: skip
_LARGEST_ORDER = 2000


def build(dimension: int) -> Problem:
    """The problem for `dimension` marks, 2 to 2000."""
    require_size("golomb_ruler", dimension, 2, _LARGEST_ORDER)
    proven = dimension - 2 < len(_OPTIMAL)
    # All n(n - 1)/2 differences are distinct positive integers, so the largest is at least their number.
    bound = _OPTIMAL[dimension - 2] if proven else dimension * (dimension - 1) // 2
    best_known = BestKnown(bound, "2022", "optimal rulers, proven up to 28 marks by distributed.net")

    def read(candidate: object) -> list[int]:
        marks = sequence(candidate, f"the candidate must be a list of {dimension} integers")
        if len(marks) != dimension:
            raise CandidateFault(f"{len(marks)} marks given; {dimension} are required")
        return [integer(value, f"mark {index}") for index, value in enumerate(marks)]

    def check(marks: list[int]) -> tuple[int, str]:
        _refuse_repeated_differences(marks)
        length = max(marks) - min(marks)
        return length, f"{dimension} marks with distinct differences, length {length}"

    return Problem(
        name="golomb_ruler",
        dimension=dimension,
        statement=(
            f"Find a Golomb ruler with {dimension} marks, as short as possible: {dimension} integers whose pairwise "
            "differences are all distinct. The score is the largest minus the smallest mark, and lower is better."
        ),
        schema=f"a list of {dimension} integers",
        goal="minimize",
        bound=bound,
        bound_source="optimal, by exhaustive search" if proven else "as many differences as pairs",
        best_known=best_known if proven else None,
        depth=1,
        read=read,
        check=check,
    )


def _refuse_repeated_differences(marks: list[int]) -> None:
    if duplicates := first_duplicates(marks):
        raise CandidateFault("marks {} and {} are duplicates ({})".format(*duplicates, marks[duplicates[0]]))
    seen: dict[int, tuple[int, int]] = {}
    for j, second in enumerate(marks):
        for i, first in enumerate(marks[:j]):
            difference = abs(second - first)
            if difference in seen:
                k, m = seen[difference]
                raise CandidateFault(f"difference {difference} occurs twice (marks {k} and {m}, marks {i} and {j})")
            seen[difference] = (i, j)
