"""The shipped search for kissing configurations, sent through the loop as the text of a candidate program.

Standard library and NumPy only, and nothing of the package, since it runs in the sandbox. Its points have squared norm
2 or 4.
"""

import itertools
import random
import time
from collections.abc import Iterable

import numpy as np

Vector = tuple[int, ...]
LARGEST_SHELL = 16
"""In higher dimensions the conflicts of the shell no longer fit in memory."""


def search(dimension: int, seed: int, seconds: float, start: list[list[int]]) -> list[Vector]:
    """A large valid set: built anew where `start` is empty, else `start` perturbed and repaired, never smaller."""
    draw = random.Random(seed)
    deadline = time.monotonic() + seconds
    if start:
        return perturb_and_repair([tuple(vector) for vector in start], dimension, draw, deadline)
    shells = [axes(dimension), roots(dimension)]
    if dimension >= 4:
        shells.append(axes(dimension) + signed_words(constant_weight_code(dimension, draw, deadline), dimension))
    return max(shells, key=len)


def roots(dimension: int) -> list[Vector]:
    """The 2d(d - 1) vectors +-e_i +- e_j of squared norm 2: the roots of D_d."""
    return [
        tuple(a if k == i else b if k == j else 0 for k in range(dimension))
        for i, j in itertools.combinations(range(dimension), 2)
        for a, b in itertools.product((1, -1), repeat=2)
    ]


def axes(dimension: int) -> list[Vector]:
    """The 2d vectors +-2 e_i of squared norm 4."""
    return [tuple(a if k == i else 0 for k in range(dimension)) for i in range(dimension) for a in (2, -2)]


def signed_words(words: Iterable[Vector], dimension: int) -> list[Vector]:
    """All sixteen sign patterns on each four-subset, of squared norm 4."""
    return [
        tuple(signs[word.index(k)] if k in word else 0 for k in range(dimension))
        for word in words
        for signs in itertools.product((1, -1), repeat=4)
    ]


def constant_weight_code(length: int, draw: random.Random, deadline: float) -> list[Vector]:
    """Four-subsets of `length` points that meet pairwise in at most two, found among all of them."""
    words = list(itertools.combinations(range(length), 4))
    conflicts = conflicting([[(point, 1) for point in word] for word in words])
    # Three points lie in at most one word: where the Johnson bound is met, the search is over.
    enough = length * ((length - 1) * ((length - 2) // 2) // 3) // 4
    return [words[v] for v in independent_set(conflicts, [], enough, draw, deadline)]


def perturb_and_repair(start: list[Vector], dimension: int, draw: random.Random, deadline: float) -> list[Vector]:
    """Throws out a tenth of `start` and searches on among all integer vectors of squared norm 4."""
    if dimension > LARGEST_SHELL:
        return start
    shell = axes(dimension) + signed_words(itertools.combinations(range(dimension), 4), dimension)
    position = {vector: index for index, vector in enumerate(shell)}
    if any(vector not in position for vector in start):
        return start  # the other shell is no place for this move
    conflicts = conflicting([[(k, x) for k, x in enumerate(vector) if x] for vector in shell])
    chosen = [position[vector] for vector in start]
    kept = draw.sample(chosen, len(chosen) - len(chosen) // 10)
    found = independent_set(conflicts, kept, len(shell), draw, deadline)
    return [shell[v] for v in found] if len(found) > len(start) else start


def conflicting(vectors: list[list[tuple[int, int]]]) -> list[list[int]]:
    """For each vector, given by its nonzero (place, value) pairs, those that it is too close to.

    For squared norm 4 that is an inner product of 3: three pairs agree, and the fourth lies in different places (in the
    same place, with opposite sign, it brings the product down to 2).
    """
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for vertex, pairs in enumerate(vectors):
        for triple in itertools.combinations(pairs, 3):
            holders.setdefault(triple, []).append(vertex)
    places = [tuple(place for place, _ in pairs) for pairs in vectors]
    conflicts: list[set[int]] = [set() for _ in vectors]
    for group in holders.values():
        for vertex in group:
            conflicts[vertex].update(other for other in group if places[other] != places[vertex])
    return [sorted(group) for group in conflicts]


def independent_set(
    conflicts: list[list[int]], start: list[int], enough: int, draw: random.Random, deadline: float
) -> list[int]:
    """A large set of vertices without conflicts, by tabu search: always enter the vertex that evicts fewest.

    An evicted vertex stays out for some steps. After a long time without progress a fifth of the set is thrown out.
    Ends at `enough` vertices or at the deadline.
    """
    neighbours = [np.array(group, dtype=np.intp) for group in conflicts]
    inside = np.zeros(len(conflicts), dtype=bool)
    hits = np.zeros(len(conflicts), dtype=np.int32)  # neighbours inside
    barred_until = np.zeros(len(conflicts), dtype=np.int64)
    for vertex in start:
        inside[vertex] = True
        hits[neighbours[vertex]] += 1
    best, size, step, progress = list(start), len(start), 0, 0
    while len(best) < enough and time.monotonic() < deadline:
        step += 1
        cost = np.where(inside | ((barred_until > step) & (hits > 0)), len(conflicts), hits)
        if cost.min() == len(conflicts):
            continue  # whatever is outside must stay there for now
        entering = draw.choice(np.flatnonzero(cost == cost.min()).tolist())
        leaving = [v for v in neighbours[entering].tolist() if inside[v]]
        if step - progress > 2000:
            progress = step
            leaving += draw.sample(sorted(set(np.flatnonzero(inside).tolist()) - set(leaving)), size // 5)
        inside[entering] = True
        hits[neighbours[entering]] += 1
        for vertex in leaving:
            inside[vertex] = False
            hits[neighbours[vertex]] -= 1
            barred_until[vertex] = step + draw.randint(7, 16)
        size += 1 - len(leaving)
        if size > len(best):
            best, progress = np.flatnonzero(inside).tolist(), step
    return best
