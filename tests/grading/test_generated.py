"""A thousand pairs and more of each kind, made by rules: every right answer is paid and no wrong one is."""

import random
from collections.abc import Callable, Iterator

import pytest

from veritune.grading import is_equivalent

from . import generated
from .generated import Case, Functions

CASES = 1_000
SEED = 20


def made(rule: Callable[[random.Random], Iterator]) -> list:
    """The first rounds of a rule that give at least 1,000 different cases."""
    generator, cases = random.Random(SEED), {}
    while len(cases) < CASES:
        cases |= {(case.answer, case.gold): case for case in rule(generator)}
    return list(cases.values())


def misjudged(cases: list[Case | Functions]) -> list[tuple[str, str, bool]]:
    return [
        (case.answer, case.gold, case.right)
        for case in cases
        if is_equivalent(case.answer, case.gold) is not case.right
    ]


@pytest.mark.parametrize("rule", [generated.kinks, generated.pieces, generated.domains])
def test_functions_agree_only_where_they_are_equal_everywhere(rule: Callable) -> None:
    cases = made(rule)
    assert all(generated.witness(case) is not case.right for case in cases)
    assert 0.4 < sum(case.right for case in cases) / len(cases) < 0.6
    assert misjudged(cases) == []


@pytest.mark.parametrize("rule", [generated.percentages, generated.alternatives, generated.near_numbers])
def test_every_right_answer_is_paid_and_no_wrong_one(rule: Callable) -> None:
    cases = made(rule)
    assert 0.4 < sum(case.right for case in cases) / len(cases) < 0.6
    assert misjudged(cases) == []
