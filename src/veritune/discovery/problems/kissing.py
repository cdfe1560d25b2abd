"""Kissing numbers: how many unit spheres can touch one, in d dimensions.

A set C of nonzero integer vectors whose minimum distance is at least its maximum norm proves kissing number >= |C|:
for |x| <= |y| <= |x - y| the angle between x and y is at least 60 degrees.
"""

from __future__ import annotations

from veritune.core.errors import ConfigError
from veritune.discovery.distances import minimum_squared_distance, squared_norm
from veritune.discovery.problem import BestKnown, CandidateFault, Problem, integer_rows, judged

_LEECH = "Leech and Sloane, Sphere packing and error-correcting codes; sections of the Leech lattice"
_GANZHINOV = "Ganzhinov, Highly symmetric lines"
_COHN_LI = "Cohn and Li, Kissing numbers in dimensions seventeen through twenty-one"
_MITTELMANN = "Mittelmann and Vallentin 2010, semidefinite programming"
_DE_LAAT = "de Laat and Leijenhorst 2022, semidefinite programming"
_LEVENSHTEIN = "Levenshtein 1979; Odlyzko and Sloane 1979"

# dimension: (lower bound, its date, its source, proven upper bound, its source)
_KNOWN: dict[int, tuple[int, str, str, int, str]] = {
    1: (2, "ancient", "two points of a line", 2, "elementary"),
    2: (6, "ancient", "hexagon", 6, "elementary"),
    3: (12, "1694", "Newton; icosahedron", 12, "Schütte and van der Waerden 1953"),
    4: (24, "1852", "24-cell (Schläfli)", 24, "Musin 2003"),
    5: (40, "1873", "roots of D5 (Korkine and Zolotareff)", 44, _MITTELMANN),
    6: (72, "1873", "roots of E6 (Korkine and Zolotareff)", 77, "de Laat, Leijenhorst and de Muinck Keizer 2024"),
    7: (126, "1873", "roots of E7 (Korkine and Zolotareff)", 134, _MITTELMANN),
    8: (240, "1873", "roots of E8 (Korkine and Zolotareff)", 240, _LEVENSHTEIN),
    9: (306, "1971", _LEECH, 363, "Machado and de Oliveira Filho 2018, semidefinite programming"),
    10: (510, "2022", _GANZHINOV, 553, "Machado and de Oliveira Filho 2018, semidefinite programming"),
    11: (604, "2026", "record tables; not of this integer form, whose record is 593 (AlphaEvolve 2025)", 868, _DE_LAAT),
    12: (840, "1971", _LEECH, 1355, _DE_LAAT),
    13: (1154, "1999", "Zinoviev and Ericson, New lower bounds for kissing numbers", 2064, _DE_LAAT),
    14: (1932, "2022", _GANZHINOV, 3174, _DE_LAAT),
    15: (2564, "1971", _LEECH, 4853, _DE_LAAT),
    16: (4320, "1959", "Barnes-Wall lattice", 7320, _DE_LAAT),
    17: (5730, "2024", _COHN_LI, 10978, _DE_LAAT),
    18: (7654, "2024", _COHN_LI, 16406, _DE_LAAT),
    19: (11948, "2026", "Ho, A new lower bound for the kissing number in 19 dimensions", 24417, _DE_LAAT),
    20: (19448, "2024", _COHN_LI, 36195, _DE_LAAT),
    21: (29768, "2024", _COHN_LI, 53524, _DE_LAAT),
    22: (49896, "1967", _LEECH, 80810, _DE_LAAT),
    23: (93150, "1967", _LEECH, 122351, _DE_LAAT),
    24: (196560, "1967", "Leech lattice", 196560, _LEVENSHTEIN),
}
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

    def check(candidate: object) -> tuple[int, str]:
        points = integer_rows(
            candidate, dimension, noun="point", at_least=2, at_most=bound,
            why_at_most=f"the proven upper bound in dimension {dimension}",
        )  # fmt: skip
        for index, point in enumerate(points):
            if not any(point):
                raise CandidateFault(f"point {index} is the zero vector; every point must be nonzero")
        norm = max(map(squared_norm, points))
        distance, i, j = minimum_squared_distance(points)
        if distance < norm:
            duplicate = ": the two points are duplicates" if distance == 0 else ""
            raise CandidateFault(
                f"Minimum squared distance {distance} < maximum squared norm {norm} (points {i} and {j}){duplicate}"
            )
        return len(points), f"{len(points)} points: minimum squared distance {distance} >= maximum squared norm {norm}"

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
            f"a list of points, each a list of {dimension} integers (no floats) of at most 256 bits; "
            "points are numbered from 0 in messages"
        ),
        goal="maximize",
        bound=bound,
        bound_source=bound_source,
        best_known=best_known,
        verify=judged(check),
    )
