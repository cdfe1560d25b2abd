"""The shipped search for kissing configurations, sent through the loop as the text of a candidate program.

Standard library only, and nothing of the package: it runs in the sandbox. Its points have squared norm 2 or 4.
"""

import itertools
import random
import time
from collections.abc import Iterable

Vector = tuple[int, ...]


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
    conflicts = conflicting((itertools.combinations(word, 3) for word in words), len(words))
    # Three points lie in at most one word: where the Johnson bound is met, the search is over.
    enough = length * ((length - 1) * ((length - 2) // 2) // 3) // 4
    return [words[v] for v in independent_set(conflicts, [], enough, draw, deadline)]


def perturb_and_repair(start: list[Vector], dimension: int, draw: random.Random, deadline: float) -> list[Vector]:
    """Throws out a tenth of `start` and searches on among all integer vectors of squared norm 4."""
    shell = axes(dimension) + signed_words(itertools.combinations(range(dimension), 4), dimension)
    position = {vector: index for index, vector in enumerate(shell)}
    if any(vector not in position for vector in start):
        return start  # the other shell is no place for this move
    # Two vectors of squared norm 4 are too close exactly if three signed places agree (an inner product of 3).
    triples = (itertools.combinations([(k, x) for k, x in enumerate(vector) if x], 3) for vector in shell)
    chosen = [position[vector] for vector in start]
    kept = draw.sample(chosen, len(chosen) - len(chosen) // 10)
    found = independent_set(conflicting(triples, len(shell)), kept, len(shell), draw, deadline)
    return [shell[v] for v in found] if len(found) > len(start) else start


def conflicting(triples_of: Iterable[Iterable[tuple[object, ...]]], count: int) -> list[list[int]]:
    """For each of `count` vertices, those that share a triple with it."""
    holders: dict[tuple[object, ...], list[int]] = {}
    for vertex, triples in enumerate(triples_of):
        for triple in triples:
            holders.setdefault(triple, []).append(vertex)
    conflicts: list[set[int]] = [set() for _ in range(count)]
    for group in holders.values():
        for vertex in group:
            conflicts[vertex].update(group)
    return [sorted(group - {vertex}) for vertex, group in enumerate(conflicts)]


def independent_set(
    conflicts: list[list[int]], start: list[int], enough: int, draw: random.Random, deadline: float
) -> list[int]:
    """A large set of vertices without conflicts, by tabu search: always enter the vertex that evicts fewest.

    An evicted vertex stays out for some steps. After a long time without progress a fifth of the set is thrown out.
    Ends at `enough` vertices or at the deadline.
    """
    inside, hits, barred_until = [False] * len(conflicts), [0] * len(conflicts), [0] * len(conflicts)

    def put(vertex: int, present: bool) -> None:
        inside[vertex] = present
        for neighbour in conflicts[vertex]:
            hits[neighbour] += 1 if present else -1

    for vertex in start:
        put(vertex, True)
    best, size, step, progress = list(start), len(start), 0, 0
    while len(best) < enough and time.monotonic() < deadline:
        step += 1
        outside = [v for v in range(len(conflicts)) if not inside[v] and (hits[v] == 0 or barred_until[v] <= step)]
        if not outside:
            continue
        fewest = min(hits[v] for v in outside)
        entering = draw.choice([v for v in outside if hits[v] == fewest])
        leaving = [v for v in conflicts[entering] if inside[v]]
        put(entering, True)
        size += 1
        if step - progress > 2000:
            progress = step
            leaving += draw.sample([v for v in range(len(conflicts)) if inside[v] and v not in leaving], size // 5)
        for vertex in leaving:
            put(vertex, False)
            barred_until[vertex] = step + draw.randint(7, 16)
        size -= len(leaving)
        if size > len(best):
            best, progress = [v for v in range(len(conflicts)) if inside[v]], step
    return best
