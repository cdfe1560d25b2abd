"""Covering designs C(v, k, t): the fewest k-subsets of v points such that every t-subset lies in one of them."""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations, islice
from math import comb

import numpy as np

from veritune.core.errors import ConfigError
from veritune.discovery.problem import BestKnown, CandidateFault, Problem, integer_rows
from veritune.discovery.problems import literature

_LARGEST_COUNT = 2_000_000
"""Of t-subsets to cover: what a verifier can enumerate in seconds."""
_RANKS_AT_ONCE = 1 << 20
"""Of t-subsets of blocks; bounds the memory of a verification."""


def build(dimension: int, block_size: int, strength: int) -> Problem:
    """C(v, k, t) with v = `dimension`, k = `block_size` and t = `strength`, 1 <= t <= k <= v."""
    if not 1 <= strength <= block_size <= dimension:
        raise ConfigError(
            f"covering_design got v={dimension}, k={block_size}, t={strength}; they must satisfy 1 <= t <= k <= v"
        )
    wanted = comb(dimension, strength)
    if wanted > _LARGEST_COUNT:
        raise ConfigError(f"covering_design has {wanted} subsets to cover; at most {_LARGEST_COUNT} are supported")
    bound = _schonheim(dimension, block_size, strength)
    # Where a Steiner system exists, every t-subset lies in exactly one of its blocks: the bound is exact.
    known = literature("covering_design", f"{dimension},{block_size},{strength}")
    read = partial(
        integer_rows, columns=block_size, noun="block", at_least=1, at_most=wanted,
        why_at_most="with which every subset can have a block of its own",
    )  # fmt: skip

    def check(blocks: list[list[int]]) -> tuple[int, str]:
        for index, block in enumerate(blocks):
            if len(set(block)) < block_size or not all(0 <= x < dimension for x in block):
                raise CandidateFault(
                    f"block {index} is {block}; it must have {block_size} distinct points between 0 and {dimension - 1}"
                )
        distinct = dict.fromkeys(tuple(sorted(block)) for block in blocks)
        covered = _covered(np.array(list(distinct)), dimension, strength)
        if not covered.all():
            missed = next(islice(combinations(range(dimension), strength), int(covered.argmin()), None))
            raise CandidateFault(
                f"{wanted - covered.sum()} of {wanted} subsets are not covered; the first is {list(missed)}"
            )
        return len(blocks), f"{len(blocks)} blocks cover all {wanted} subsets of {strength} points"

    return Problem(
        name=f"covering_design:{block_size},{strength}",
        dimension=dimension,
        statement=(
            f"Find a covering design C({dimension}, {block_size}, {strength}) with as few blocks as possible: subsets "
            f"of {block_size} of the points 0 to {dimension - 1} such that every {strength} points lie together in at "
            "least one block. The score is the number of blocks, and lower is better."
        ),
        schema=f"a list of blocks, each a list of {block_size} distinct integers between 0 and {dimension - 1}",
        goal="minimize",
        bound=bound,
        bound_source="Schönheim 1964",
        best_known=BestKnown(bound, "classical", known["steiner"]) if known else None,
        depth=2,
        read=read,
        check=check,
    )


def _covered(blocks: np.ndarray, points: int, strength: int) -> np.ndarray:
    """Which subsets of `strength` of the points lie in a block, in lexicographic order, as booleans (subsets,).

    `blocks` is (b, block size), each row ascending. The rank of c_1 < ... < c_t among all t-subsets of v points is
    C(v, t) - 1 - sum of C(v - 1 - c_i, t + 1 - i), so that subsets are found by sums in place of a search. The rest of
    the blocks is left out as soon as nothing is missing.
    """
    subsets, in_block = comb(points, strength), comb(blocks.shape[1], strength)
    chosen = chain.from_iterable(combinations(range(blocks.shape[1]), strength))
    places = np.fromiter(chosen, dtype=np.int16, count=in_block * strength).reshape(in_block, strength)
    weights = np.array([[comb(points - 1 - c, strength - i) for c in range(points)] for i in range(strength)])
    covered = np.zeros(subsets, dtype=bool)
    blocks_at_once = max(1, _RANKS_AT_ONCE // in_block)
    for start in range(0, len(blocks), blocks_at_once):
        some = blocks[start : start + blocks_at_once]
        ranks = np.full((len(some), in_block), subsets - 1)
        for i in range(strength):
            ranks -= weights[i][some][:, places[:, i]]
        covered[ranks] = True
        if covered.all():
            break
    return covered


def _schonheim(v: int, k: int, t: int) -> int:
    """ceil(v/k * ceil((v-1)/(k-1) * ... * ceil((v-t+1)/(k-t+1)))), a proven lower bound."""
    bound = 1
    for i in reversed(range(t)):
        bound = -(-(v - i) * bound // (k - i))
    return bound
