"""Kissing numbers: how many unit spheres can touch one, in d dimensions.

A set C of nonzero integer vectors whose minimum distance is at least its maximum norm proves kissing number >= |C|:
for |x| <= |y| <= |x - y| the angle between x and y is at least 60 degrees.
"""

from __future__ import annotations

from functools import partial

from veritune.core.errors import ConfigError
from veritune.discovery.distances import minimum_squared_distance, squared_norm
from veritune.discovery.problem import BestKnown, CandidateFault, Problem, first_duplicates, integer_rows

_KORKINE = "Korkine and Zolotareff, Sur les formes quadratiques"
_LEECH = "Leech, Notes on sphere packings"
_LEECH_SLOANE = "Leech and Sloane, Sphere packing and error-correcting codes"
_GANZHINOV = "Ganzhinov, Highly symmetric lines"
_COHN_LI = "Cohn and Li, Improved kissing numbers in seventeen through twenty-one dimensions"
_ARENA = (
    "EinsteinArena, Harnessing the collective intelligence of AI agents in the wild for new discoveries, in any form; "
    "in this integer form at least 600 are known"
)
_LINEAR_PROGRAM = (
    "Levenshtein, On bounds for packings in n-dimensional Euclidean space, 1979; Odlyzko and Sloane, New bounds on the "
    "number of unit spheres that can touch a unit sphere in n dimensions, 1979"
)
_MITTELMANN = "Mittelmann and Vallentin, High accuracy semidefinite programming bounds for kissing numbers, 2010"
_MACHADO = (
    "Machado and de Oliveira Filho, Improving the semidefinite programming bound for the kissing number by exploiting "
    "polynomial symmetry, 2018"
)
_DE_LAAT = (
    "de Laat and Leijenhorst, Solving clustered low-rank semidefinite programs arising from polynomial optimization, "
    "2022"
)

# dimension: (lower bound, its year, its source, proven upper bound, its source with the year)
_KNOWN: dict[int, tuple[int, str, str, int, str]] = {
    1: (2, "ancient", "elementary: two points of a line", 2, "elementary: a line has two directions"),
    2: (6, "ancient", "elementary: the hexagon", 6, "elementary: six angles of 60 degrees fill the circle"),
    3: (12, "1611", "Kepler, De nive sexangula",
        12, "Schütte and van der Waerden, Das Problem der dreizehn Kugeln, 1953"),
    4: (24, "1852", "Schläfli, Theorie der vielfachen Kontinuität (24-cell)",
        24, "Musin, The kissing number in four dimensions, 2008"),
    5: (40, "1873", f"{_KORKINE} (roots of D5)", 44, _MITTELMANN),
    6: (72, "1873", f"{_KORKINE} (roots of E6)",
        77, "de Laat, Leijenhorst and de Muinck Keizer, Optimality and uniqueness of the D4 root system, 2024"),
    7: (126, "1873", f"{_KORKINE} (roots of E7)", 134, _MITTELMANN),
    8: (240, "1873", f"{_KORKINE} (roots of E8)", 240, _LINEAR_PROGRAM),
    9: (306, "1971", _LEECH_SLOANE, 363, _MACHADO),
    10: (510, "2022", _GANZHINOV, 553, _MACHADO),
    11: (604, "2026", _ARENA, 868, _DE_LAAT),
    12: (840, "1971", _LEECH_SLOANE, 1355, _DE_LAAT),
    13: (1154, "1999", "Zinoviev and Ericson, New lower bounds for contact numbers in small dimensions",
         2064, _DE_LAAT),
    14: (1932, "2022", _GANZHINOV, 3174, _DE_LAAT),
    15: (2564, "1971", _LEECH_SLOANE, 4853, _DE_LAAT),
    16: (4320, "1959", "Barnes and Wall, Some extreme forms defined in terms of Abelian groups", 7320, _DE_LAAT),
    17: (5730, "2024", _COHN_LI, 10978, _DE_LAAT),
    18: (7654, "2024", _COHN_LI, 16406, _DE_LAAT),
    19: (11948, "2026", "Ho, A new lower bound for the kissing number in 19 dimensions", 24417, _DE_LAAT),
    20: (19448, "2024", _COHN_LI, 36195, _DE_LAAT),
    21: (29768, "2024", _COHN_LI, 53524, _DE_LAAT),
    22: (49896, "1967", _LEECH, 80810, _DE_LAAT),
    23: (93150, "1967", _LEECH, 122351, _DE_LAAT),
    24: (196560, "1967", _LEECH, 196560, _LINEAR_PROGRAM),
}  # fmt: skip
_LARGEST_DIMENSION = 64
"""Beyond the table the bound below is astronomically weak, and candidates would be too large to compare pairwise."""


def build(dimension: int) -> Problem:
    """The kissing problem in `dimension`, 1 to 64; beyond 24 the upper bound is the elementary 3**d - 1."""
    if not 1 <= dimension <= _LARGEST_DIMENSION:
        raise ConfigError(f"dimension is {dimension}; for kissing it must lie between 1 and {_LARGEST_DIMENSION}")
    best_known = None
    # Spheres of radius 1/2 about the points of contact, and the central one, lie within radius 3/2.
    bound, bound_source = 3**dimension - 1, "elementary: volume of the ball of three times the radius"
    if dimension in _KNOWN:
        lower, date, source, bound, bound_source = _KNOWN[dimension]
        best_known = BestKnown(lower, date, source)

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
        bound_source=bound_source,
        best_known=best_known,
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
