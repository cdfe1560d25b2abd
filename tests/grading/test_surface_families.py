"""Families of answers by rule, as many wrong as right: the right ones are paid and the wrong ones are not."""

import pytest
from tests.grading.surface_families import FAMILIES, draw

from veritune.grading import is_equivalent

COUNT = {"no solution": 200}
"""Pairs of each kind, where a family has no more; 600 elsewhere."""


@pytest.mark.parametrize("family", FAMILIES)
def test_right_answers_are_paid(family: str) -> None:
    pairs = draw(FAMILIES[family][0], COUNT.get(family, 600), f"{family}, right")
    assert len(pairs) == COUNT.get(family, 600)
    assert [pair for pair in pairs if not is_equivalent(*pair)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_answers_are_not_paid(family: str) -> None:
    pairs = draw(FAMILIES[family][1], COUNT.get(family, 600), f"{family}, wrong")
    assert len(pairs) == COUNT.get(family, 600)
    assert [pair for pair in pairs if is_equivalent(*pair)] == []
