"""The exact verifiers, against sets and counts that mathematics fixes and against plain Python arithmetic."""

from __future__ import annotations

import random
import time
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.errors import ConfigError
from veritune.discovery import build_problem, problem_names
from veritune.discovery.distances import minimum_squared_distance

KISSING = build_problem("kissing", 11)


def axes(dimension: int) -> list[list[int]]:
    return [[s if k == i else 0 for k in range(dimension)] for i in range(dimension) for s in (2, -2)]


def roots(dimension: int) -> list[list[int]]:
    return [
        [a if k == i else b if k == j else 0 for k in range(dimension)]
        for i, j in combinations(range(dimension), 2)
        for a, b in product((1, -1), repeat=2)
    ]


def code_shell(words, dimension: int) -> list[list[int]]:
    shell = axes(dimension)
    for word in words:
        for signs in product((1, -1), repeat=4):
            row = [0] * dimension
            for place, sign in zip(word, signs, strict=True):
                row[place] = sign
            shell.append(row)
    return shell


EXTENDED_HAMMING = [word for word in combinations(range(8), 4) if word[0] ^ word[1] ^ word[2] ^ word[3] == 0]
"""The 14 words of weight four of the [8, 4, 4] code: any two meet in at most two points."""


def scaled(points, factor: int):
    return [[factor * x for x in point] for point in points]


@pytest.mark.parametrize(
    ("dimension", "points", "score"),
    [
        (11, axes(11), 22),
        (11, roots(11), 220),
        (8, code_shell(EXTENDED_HAMMING, 8), 240),
        (8, scaled(code_shell(EXTENDED_HAMMING, 8), 2**252), 240),
        (3, roots(3), 12),
        (4, roots(4), 24),
        (1, [[1], [-1]], 2),
        (2, [[1, 0], [0, 1], [-1, 0], [0, -1]], 4),
        (2, [[5, 0], [0, 3], [-5, 0]], None),  # |(5,0) - (0,3)|^2 = 34 >= 25
    ],
)
def test_sets_that_prove_a_kissing_number(dimension, points, score) -> None:
    verdict = build_problem("kissing", dimension).verify(points)
    assert verdict.valid, verdict.message
    assert verdict.score == (score or 3)


def test_an_empty_shell_of_the_right_size_is_not_enough() -> None:
    too_close = [*axes(11), [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]]
    # (2,0,0) - (1,1,1): 1 + 1 + 1 = 3; the first such pair is that of points 0 and 22
    assert KISSING.verify(too_close).message == "Minimum squared distance 3 < maximum squared norm 4 (points 0 and 22)"


FAULTS = {
    "Minimum squared distance 0 < maximum squared norm 2 (points 3 and 220): the two points are duplicates": (
        lambda p: [*p, p[3]]
    ),
    "point 7 is the zero vector": lambda p: [*p[:7], [0] * 11, *p[8:]],
    "point 5 has 12 coordinates; 11 are required": lambda p: [*p[:5], [*p[5], 0], *p[6:]],
    "point 5 has 10 coordinates; 11 are required": lambda p: [*p[:5], p[5][:10], *p[6:]],
    "coordinate 2 of point 9 is the float 1.5": lambda p: [*p[:9], [*p[9][:2], 1.5, *p[9][3:]], *p[10:]],
    "coordinate 2 of point 9 has 997 bits": lambda p: [*p[:9], [*p[9][:2], 1e300, *p[9][3:]], *p[10:]],
    "coordinate 0 of point 0 is the float nan": lambda p: [[float("nan"), *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 is the float inf": lambda p: [[float("inf"), *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 is the boolean True": lambda p: [[True, *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 is the string '1'": lambda p: [["1", *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 is null": lambda p: [[None, *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 is a list of 1": lambda p: [[[1], *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 has 300 bits; at most 256 are allowed": lambda p: [[2**299, *p[0][1:]], *p[1:]],
    "coordinate 0 of point 0 has 257 bits; at most 256 are allowed": lambda p: [[-(2**256), *p[0][1:]], *p[1:]],
    "point 1 must be a list of 11 integers, not the string": lambda p: [p[0], "11 integers", *p[2:]],
    "the candidate must be a list of points, not a value of type dict": lambda p: {"0": p},
    "the candidate must be a list of points, not null": lambda p: None,
    "0 points given; at least 2 are needed": lambda p: [],
    "1 points given; at least 2 are needed": lambda p: p[:1],
    "3017 points exceed 868, the proven upper bound in dimension 11": lambda p: (p * 20)[:3017],
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(message: str) -> None:
    verdict = KISSING.verify(FAULTS[message](roots(11)))
    assert (verdict.valid, verdict.score) == (False, 0)
    assert verdict.message.startswith(message)


def test_one_changed_coordinate_is_named_with_its_pair() -> None:
    points = roots(11)
    points[40][0] += 1  # from some +-e_i +- e_j: its norm grows, and the exact pair comes from brute force
    distance, i, j = brute_force(points)
    norm = max(sum(x * x for x in point) for point in points)
    assert distance < norm
    expected = f"Minimum squared distance {distance} < maximum squared norm {norm} (points {i} and {j})"
    assert KISSING.verify(points).message.startswith(expected)


def test_numbers_that_wrap_in_64_bits_deceive_nobody() -> None:
    """Mod 2**64 every squared norm here is 0 and every distance looks large; in truth the points crowd together."""
    points = [[2**32 + k if i == 0 else 2**32 for i in range(11)] for k in range(50)]
    wrapped = np.array(points, dtype=np.int64)
    assert (wrapped * wrapped).sum(axis=1).max() < 2**40  # int64 sees small norms indeed
    verdict = KISSING.verify(points)
    norm = (2**32 + 49) ** 2 + 10 * 2**64
    assert verdict.message == f"Minimum squared distance 1 < maximum squared norm {norm} (points 0 and 1)"


def test_equality_to_the_last_bit_decides() -> None:
    """Distance and norm agree in their first 500 bits; floats of any kind could not tell."""
    big = 2**255
    exact = [[big, 0], [0, big - 1], [-big, 0]]
    # |x - y|^2 = big^2 + (big - 1)^2 is more than big^2; shrinking one coordinate of a 60 degree pair breaks it
    assert build_problem("kissing", 2).verify(exact).valid
    hexagon_like = [[big, 0, 0], [0, big, 0], [0, 0, big], [big - 1, 1, 0]]
    verdict = build_problem("kissing", 3).verify(hexagon_like)
    assert not verdict.valid
    assert "Minimum squared distance 2 <" in verdict.message
    tight = [[big, big, 0], [big, 0, big]]  # distance^2 = norm^2 = 2 big^2
    assert build_problem("kissing", 3).verify(tight).valid
    assert not build_problem("kissing", 3).verify([[big, big, 1], [big, 0, big]]).valid


def test_numpy_integers_and_whole_floats_are_integers() -> None:
    assert KISSING.verify(np.array(roots(11), dtype=np.int8)).score == 220
    assert KISSING.verify([np.array(row) for row in axes(11)]).score == 22
    for kind in (np.float64, np.float32, np.float16, np.longdouble):
        assert KISSING.verify(np.array(roots(11), dtype=kind)).score == 220
        uneven = np.array(roots(11), dtype=kind)
        uneven[7, 3] += 0.5
        message = KISSING.verify(uneven).message
        assert message == f"coordinate 3 of point 7 is the float {uneven[7, 3]}; only integers are allowed"
    assert KISSING.judge([[float(x) for x in row] for row in axes(11)]).points == axes(11)
    assert "is the boolean" in KISSING.verify(np.array(axes(11)) > 0).message


SHAPES = {
    "bare": lambda p: p,
    "in a tuple": lambda p: (p,),
    "with its dimension": lambda p: (p, 11),
    "with a wrong dimension": lambda p: (p, 12),
    "in a list": lambda p: [p, 11],
    "an array": np.array,
    "an array of whole floats": lambda p: np.array(p, dtype=float),
    "an array in a tuple": lambda p: (np.array(p),),
    "an array with its dimension": lambda p: (np.array(p, dtype=float), np.int64(11)),
    "tuples": lambda p: tuple(map(tuple, p)),
    "an array of one more dimension": lambda p: np.array([p]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_candidate_may_stand_first_in_a_tuple(name: str) -> None:
    verdict, points, num_points = KISSING.judge(SHAPES[name](axes(11)))
    assert (verdict.valid, verdict.score, num_points, points) == (True, 22, 22, axes(11))


def test_nothing_else_is_unwrapped() -> None:
    two_sets = KISSING.verify((axes(11), roots(11)))
    assert two_sets.message == "point 0 has 22 coordinates; 11 are required"
    assert not KISSING.verify(((axes(11),),)).valid
    assert KISSING.verify(([], 11)).message == "0 points given; at least 2 are needed"
    assert KISSING.verify(np.array(3)).message == "the candidate must be a list of points, not a value of type int"
    assert build_problem("golomb_ruler", 4).judge(([0.0, 1.0, 4.0, 6.0], 4)).points == [0, 1, 4, 6]
    assert build_problem("golomb_ruler", 4).verify([0, 1, 4, 6]).score == 6


def test_duplicates_are_found_without_comparing_pairs(monkeypatch) -> None:
    monkeypatch.delattr("veritune.discovery.problems.kissing.minimum_squared_distance")
    points = roots(11)
    said = "Minimum squared distance 0 < maximum squared norm {} (points {} and {}): the two points are duplicates"
    assert KISSING.verify([*points, points[9], points[3], points[9]]).message == said.format(2, 3, 221)
    assert build_problem("kissing", 24).verify([[1, 0] * 12] * 20_000).message == said.format(12, 0, 1)


def brute_force(points) -> tuple[int, int, int]:
    return min(
        (sum((x - y) ** 2 for x, y in zip(points[i], points[j], strict=True)), i, j)
        for i, j in combinations(range(len(points)), 2)
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_minimum_distance_is_that_of_plain_arithmetic(data) -> None:
    dimension = data.draw(st.integers(1, 24))
    bits = data.draw(st.sampled_from([1, 2, 8, 10, 11, 21, 22, 24, 25, 26, 43, 63, 64, 65, 128, 256]))
    coordinate = st.integers(1 - 2**bits, 2**bits - 1)
    near = st.sampled_from([2**bits - 1, 2**bits - 2, 1 - 2**bits, 0, 1])
    row = st.lists(coordinate | near, min_size=dimension, max_size=dimension)
    points = data.draw(st.lists(row, min_size=2, max_size=7))
    assert minimum_squared_distance(points) == brute_force(points)


def test_small_tiles_do_not_change_the_minimum_of_large_coordinates(monkeypatch) -> None:
    draw = random.Random(5)
    points = [[draw.randrange(-(2**50), 2**50) for _ in range(3)] for _ in range(60)]
    points[59] = [x + 1 for x in points[31]]
    monkeypatch.setattr("veritune.discovery.distances._TILE_ROWS", 7)
    monkeypatch.setattr("veritune.discovery.distances._TILE_COLUMNS", 5)
    assert minimum_squared_distance(points) == (3, 31, 59) == brute_force(points)


@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (7, 4), (64, 64), (60, 60)])
def test_tiles_do_not_change_the_minimum_or_its_first_pair(shape, monkeypatch) -> None:
    """Among few values many pairs attain the minimum; factors that all coordinates share make no difference."""
    monkeypatch.setattr("veritune.discovery.distances._TILE_ROWS", shape[0])
    monkeypatch.setattr("veritune.discovery.distances._TILE_COLUMNS", shape[1])
    draw = random.Random(sum(shape))
    for largest in (2, 3, 900, 2**20):
        points = [[draw.randint(-largest, largest) for _ in range(3)] for _ in range(60)]
        expected = brute_force(points)
        assert minimum_squared_distance(points) == expected
        assert minimum_squared_distance(scaled(points, 6**90)) == (expected[0] * 36**90, *expected[1:])


def test_a_difference_below_the_rounding_decides() -> None:
    """Two crowds far apart: in float64 every distance within them is 0 or noise, and the last bit decides."""
    far = 2**200
    points = [[offset + 3 * k, offset + k % 2] for offset in (0, far) for k in range(20)]
    points[33] = [far + 3 * 12 + 2, far]  # 2 to the right of point 32; all others are sqrt(10) or more apart
    assert minimum_squared_distance(points) == brute_force(points) == (4, 32, 33)


def test_593_points_of_43_bits_are_quick() -> None:
    draw = random.Random(3)
    points = [[draw.randrange(-(2**43) + 1, 2**43) for _ in range(11)] for _ in range(593)]
    started = time.perf_counter()
    message = KISSING.verify(points).message
    assert time.perf_counter() - started < 1.0  # a hang limit; the figure of the bar is measured apart
    distance, i, j = brute_force(points)
    assert f"Minimum squared distance {distance} " in message
    assert f"(points {i} and {j})" in message


def test_the_table_of_bounds_is_consistent() -> None:
    values = [build_problem("kissing", d) for d in range(1, 25)]
    exact = [d for d, problem in enumerate(values, 1) if problem.best_known.value == problem.bound]
    assert exact == [1, 2, 3, 4, 8, 24]
    assert all(problem.best_known.value <= problem.bound for problem in values)
    assert [p.bound for p in values] == sorted(p.bound for p in values)
    assert all(problem.best_known.date.isdigit() for problem in values[2:])
    assert all(", " in problem.best_known.source for problem in values[2:])  # author and title
    assert all(problem.bound_source[-4:].isdigit() for problem in values[2:])  # the year, after author and title
    assert (values[10].best_known.value, values[10].bound) == (604, 868)
    assert "at least 600" in values[10].best_known.source
    beyond = build_problem("kissing", 25)
    assert (beyond.bound, beyond.best_known) == (3**25 - 1, None)


def affine_cap() -> list[list[int]]:
    """The nine points (x, y, x^2 + y^2) of an elliptic paraboloid over F_3: no three on a line."""
    return [[x, y, (x * x + y * y) % 3] for x in range(3) for y in range(3)]


def test_cap_sets() -> None:
    problem = build_problem("cap_set", 3)
    assert (problem.verify(affine_cap()).score, problem.bound) == (9, 9)
    product_cap = [[*a, *b] for a in affine_cap() for b in affine_cap()]
    assert build_problem("cap_set", 6).verify(product_cap).score == 81
    assert build_problem("cap_set", 8).best_known.value == 512
    line = [[0, 0, 0], [1, 1, 2], [0, 1, 0], [2, 2, 1]]
    assert problem.verify(line).message == "points 0, 1 and 3 lie on one line: they sum to zero modulo 3"
    assert "points 0 and 1 are duplicates" in problem.verify([[1, 0, 0], [1, 0, 0]]).message
    assert "every coordinate must be 0, 1 or 2" in problem.verify([[3, 0, 0]]).message
    assert "10 points exceed 9" in problem.verify([*affine_cap(), [0, 0, 1]]).message


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=9))
def test_a_cap_set_has_no_triple_that_sums_to_zero(points) -> None:
    distinct = len({tuple(p) for p in points}) == len(points)
    lines = any(all(sum(c) % 3 == 0 for c in zip(*triple, strict=True)) for triple in combinations(points, 3))
    assert build_problem("cap_set", 3).verify(points).valid == (distinct and not lines)


def test_no_three_in_line() -> None:
    problem = build_problem("no_three_in_line", 4)
    eight = [[0, 1], [0, 2], [1, 0], [1, 3], [2, 0], [2, 3], [3, 1], [3, 2]]
    assert problem.verify(eight).score == 8 == problem.bound
    assert problem.verify([[0, 0], [3, 3], [1, 1]]).message == "points 0, 1 and 2 lie on one line"
    assert "coordinates must lie between 0 and 3" in problem.verify([[0, 4]]).message
    assert "points 0 and 1 are duplicates" in problem.verify([[0, 1], [0, 1]]).message


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_no_three_in_line_is_no_zero_determinant(points) -> None:
    distinct = len(set(points)) == len(points)
    collinear = any(
        (b[0] - a[0]) * (c[1] - a[1]) == (c[0] - a[0]) * (b[1] - a[1]) for a, b, c in combinations(points, 3)
    )
    expected = distinct and not collinear
    assert build_problem("no_three_in_line", 6).verify([list(p) for p in points]).valid == expected


def test_golomb_rulers() -> None:
    problem = build_problem("golomb_ruler", 5)
    assert problem.verify([0, 1, 4, 9, 11]).score == 11 == problem.bound
    assert problem.verify([111, 109, 104, 101, 100]).score == 11
    assert problem.verify([0, 1, 2, 9, 20]).message == "difference 1 occurs twice (marks 0 and 1, marks 1 and 2)"
    assert "4 marks given; 5 are required" in problem.verify([0, 1, 4, 6]).message
    assert "marks 0 and 4 are duplicates (0)" in problem.verify([0, 1, 4, 9, 0]).message
    assert "mark 4 is the float 11.5" in problem.verify([0, 1, 4, 9, 11.5]).message
    assert problem.better(11, 12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-30, 30), min_size=5, max_size=5))
def test_a_golomb_ruler_measures_ten_lengths(marks) -> None:
    lengths = {abs(a - b) for a, b in combinations(marks, 2)} - {0}
    assert build_problem("golomb_ruler", 5).verify(marks).valid == (len(lengths) == 10)


FANO = [[0, 1, 2], [0, 3, 4], [0, 5, 6], [1, 3, 5], [1, 4, 6], [2, 3, 6], [2, 4, 5]]


def test_covering_designs() -> None:
    problem = build_problem("covering_design:3,2", 7)
    assert (problem.verify(FANO).score, problem.bound) == (7, 7)
    assert problem.verify([*FANO, [0, 1, 3]]).score == 8
    assert problem.verify(FANO[1:]).message == "3 of 21 subsets are not covered; the first is [0, 1]"
    assert "it must have 3 distinct points between 0 and 6" in problem.verify([[0, 0, 1]]).message
    assert "it must have 3 distinct points between 0 and 6" in problem.verify([[0, 1, 7]]).message
    everything = [list(block) for block in combinations(range(6), 4)]
    assert build_problem("covering_design:4,3", 6).verify(everything).score == comb(6, 4)
    assert problem.name == "covering_design:3,2"  # a run's log rebuilds the problem from this name
    # Schönheim by hand: ceil(7/2) = 4, ceil(8*4/3) = 11, ceil(9*11/4) = 25, ceil(10*25/5) = 50, ceil(11*50/6) = 92
    assert build_problem("covering_design:6,5", 11).bound == 92


def test_large_covering_designs(monkeypatch) -> None:
    """Against a plain count of subsets, with blocks cut into many chunks, and designs whose plain count is hopeless."""
    monkeypatch.setattr("veritune.discovery.problems.covering_design._RANKS_AT_ONCE", 50)
    draw = random.Random(4)
    for v, k, t in [(9, 4, 2), (10, 5, 3), (8, 3, 3), (7, 7, 4), (6, 4, 1)]:
        for number in (1, 5, 20):
            blocks = [draw.sample(range(v), k) for _ in range(min(number, comb(v, t)))]
            covered = {subset for block in blocks for subset in combinations(sorted(block), t)}
            missing = [list(subset) for subset in combinations(range(v), t) if subset not in covered]
            verdict = build_problem(f"covering_design:{k},{t}", v).verify(blocks)
            assert verdict.valid == (not missing)
            if missing:
                expected = f"{len(missing)} of {comb(v, t)} subsets are not covered; the first is {missing[0]}"
                assert verdict.message == expected
    monkeypatch.undo()
    # blocks with 5,005 subsets each; some 2,000 of them cover everything, and of repeated ones one counts
    many = [draw.sample(range(30), 15) for _ in range(5_000)]
    assert build_problem("covering_design:15,6", 30).verify(many).score == 5_000
    repeated = build_problem("covering_design:15,6", 30).verify([list(range(15))] * 50_000)
    assert repeated.message == "588770 of 593775 subsets are not covered; the first is [0, 1, 2, 3, 4, 15]"


def test_every_bound_that_is_called_exact_is_met_by_the_design_that_proves_it() -> None:
    for v, k, t, blocks in [(9, 3, 2, 12), (13, 4, 2, 13), (8, 4, 3, 14), (12, 6, 5, 132), (24, 8, 5, 759)]:
        problem = build_problem(f"covering_design:{k},{t}", v)
        # a Steiner system S(t, k, v) has C(v, t) / C(k, t) blocks
        assert comb(v, t) // comb(k, t) == blocks == problem.bound == problem.best_known.value


def test_unknown_problems_and_sizes() -> None:
    assert problem_names() == ["cap_set", "covering_design", "golomb_ruler", "kissing", "no_three_in_line"]
    for name, dimension, message in [
        ("kising", 11, "problem is 'kising'; it must be one of cap_set, covering_design"),
        ("kissing", 0, "dimension is 0"),
        ("kissing:3", 11, "sizes after the colon must be: none"),
        ("covering_design", 11, "sizes after the colon must be: block_size, strength"),
        ("covering_design:6,x", 11, "must have integers"),
        ("covering_design:5,6", 11, "1 <= t <= k <= v"),
        ("os", 3, "problem is 'os'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_problem(name, dimension)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
)
def test_any_json_gets_a_verdict(value) -> None:
    for name, dimension in [("kissing", 3), ("cap_set", 3), ("no_three_in_line", 3), ("golomb_ruler", 3)]:
        assert build_problem(name, dimension).verify(value).message
    assert build_problem("covering_design:3,2", 7).verify(value).message
