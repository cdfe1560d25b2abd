"""The labelled pairs, one test each, and the laws that verdicts obey."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.grading import DEFAULT_POLICY, GradingPolicy, is_equivalent
from veritune.grading.judge import judge

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").splitlines()]


def case_id(case: dict) -> str:
    return (
        f"{case['family']}-{'right' if case['right'] else 'wrong'}-{case['answer'][:30]!r}-{str(case['gold'])[:20]!r}"
    )


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_labelled_pair(case: dict) -> None:
    verdict = judge(case["answer"], case["gold"])
    assert verdict.equal is case["right"], verdict.rule


def test_the_table_covers_every_family_in_both_directions() -> None:
    right = {case["family"] for case in CASES if case["right"]}
    wrong = {case["family"] for case in CASES if not case["right"]}
    assert len(CASES) >= 2_000
    assert {"units", "bases", "intervals", "complex", "text", "times and dates"} <= right & wrong


def integers() -> st.SearchStrategy[str]:
    return st.integers(-(10**6), 10**6).map(str)


def fractions() -> st.SearchStrategy[str]:
    return st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}")


def radicals() -> st.SearchStrategy[str]:
    return st.tuples(st.integers(1, 30), st.integers(2, 30)).map(lambda pair: rf"{pair[0]}\sqrt{{{pair[1]}}}")


def tuples() -> st.SearchStrategy[str]:
    return st.tuples(integers(), fractions()).map(lambda pair: f"({pair[0]}, {pair[1]})")


def polynomials() -> st.SearchStrategy[str]:
    return st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(1, 9)).map(
        lambda coefficients: "{}x^2 + {}x - {}".format(*coefficients)
    )


def intervals() -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from("(["), st.integers(-9, 0), st.integers(1, 9), st.sampled_from(")]")).map(
        lambda parts: "{}{}, {}{}".format(*parts)
    )


ANSWERS = st.one_of(integers(), fractions(), radicals(), tuples(), polynomials(), intervals())
WRAPPINGS = st.sampled_from(
    ["{}", "${}$", r"\boxed{{{}}}", r"\({}\)", r"\[{}\]", "  {}  ", "{}.", r"$\boxed{{{}}}$", "$${}$$"]
)


@given(ANSWERS, ANSWERS, WRAPPINGS)
@settings(max_examples=300, deadline=None)
def test_wrapping_never_changes_a_verdict(answer: str, gold: str, wrapping: str) -> None:
    wrapped = wrapping.format(answer)
    assert is_equivalent(wrapped, answer)
    assert is_equivalent(wrapped, gold) == is_equivalent(answer, gold)


@given(ANSWERS, ANSWERS)
@settings(max_examples=300, deadline=None)
def test_spacing_and_display_fractions_never_change_a_verdict(answer: str, gold: str) -> None:
    verdict = is_equivalent(answer, gold)
    assert is_equivalent(answer.replace(r"\frac", r"\dfrac"), gold) == verdict
    assert is_equivalent(answer.replace(", ", ","), gold) == verdict
    assert is_equivalent(answer.replace(" + ", "+").replace(" - ", "-"), gold) == verdict


@given(ANSWERS, ANSWERS)
@settings(max_examples=300, deadline=None)
def test_equivalence_is_symmetric(first: str, second: str) -> None:
    assert is_equivalent(first, second) == is_equivalent(second, first)


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_a_fraction_equals_its_multiples_and_no_neighbour(top: int, bottom: int, factor: int) -> None:
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    assert is_equivalent(f"{top * factor}/{bottom * factor}", gold)
    assert not is_equivalent(f"{top * factor + 1}/{bottom * factor}", gold)


@given(st.integers(1, 200), st.integers(2, 200))
@settings(max_examples=200, deadline=None)
def test_a_factor_moves_under_the_root_as_its_square(factor: int, radicand: int) -> None:
    assert is_equivalent(rf"\sqrt{{{factor * factor * radicand}}}", rf"{factor}\sqrt{{{radicand}}}")
    assert not is_equivalent(rf"\sqrt{{{factor * factor * radicand + 1}}}", rf"{factor}\sqrt{{{radicand}}}")


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_the_judge_fail(answer: str, gold: str) -> None:
    assert not judge(answer, gold).rule.startswith("failed")


@given(st.text(alphabet="0123456789+-*/^()[]{}\\,.=<>|!% xyeifracsqrt$_&", max_size=120))
@settings(max_examples=500, deadline=None)
def test_no_formula_makes_the_judge_fail(text: str) -> None:
    for gold in ("5", "x^2+1", r"\text{east}", text):
        assert not judge(text, gold).rule.startswith("failed")
        assert not judge(gold, text).rule.startswith("failed")


@pytest.mark.parametrize(
    ("switch", "answer", "gold"),
    [
        ("ignore_missing_units", "5 cm", "5"),
        ("percent_is_hundredths", "50%", "0.5"),
        ("unreduced_fractions", r"\frac{2}{4}", r"\frac12"),
        ("sentences", "The answer is: 72", "72"),
        ("multiple_choice", "(B) 42", "B"),
    ],
)
def test_a_switch_turned_off_refuses_what_it_allows(switch: str, answer: str, gold: str) -> None:
    assert is_equivalent(answer, gold, DEFAULT_POLICY)
    assert not is_equivalent(answer, gold, GradingPolicy(**{switch: False}))


def test_unevaluated_expressions_can_be_allowed() -> None:
    assert not is_equivalent("2+2", "4")
    assert is_equivalent("2+2", "4", GradingPolicy(unevaluated_expressions=True))


def test_every_verdict_names_its_rule() -> None:
    rules = {answer: judge(answer, "72").rule for answer in ("72", "72.0", "70+2", "at least 72", "y", "72 or 73", "")}
    assert rules == {
        "72": "identical",
        "72.0": "number",
        "70+2": "unevaluated",
        "at least 72": "words is no value",
        "y": "value",
        "72 or 73": "list is no value",
        "": "empty",
    }
