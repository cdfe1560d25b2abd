"""Inputs made to hang, crash or execute: each is refused at once, from any thread and after a fork."""

import os
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.grading import (
    evaluate_arithmetic,
    extract_answer_tag,
    extract_boxed,
    is_equivalent,
    parse_gsm8k_response,
    parse_mmlu_response,
    question_only_reward_fn,
    r1_zero_reward_fn,
)

HANG_SECONDS = 5.0

HOSTILE = {
    "power tower": "9**9**9**9",
    "latex tower": "9^{9^{9^{9^{9}}}}",
    "googol power": "10^{10^9}",
    "nested factorials": "((((9!)!)!)!)!",
    "factorial chain": "9!!!!!!!!!!!!!!!!",
    "large factorial": "99999999!",
    "large binomial": r"\binom{100000}{50000}",
    "ten thousand braces": "{" * 10_000 + "5" + "}" * 10_000,
    "open brackets": "(" * 1_900,
    "nested brackets": "(" * 900 + "5" + ")" * 900,
    "nested fractions": r"\frac{1}{" * 180 + "2" + "}" * 180,
    "nested roots": r"\sqrt{" * 200 + "2" + "}" * 200,
    "a megabyte of digits": "7" * 1_000_000,
    "a megabyte of letters": "x" * 1_000_000,
    "a megabyte of spaces": " " * 1_000_000,
    "a megabyte of boxes": r"\boxed{" * 140_000,
    "a megabyte of answers": "<answer>5</answer>" * 60_000,
    "a megabyte of dollars": "$" * 1_000_000,
    "answer before spaces": "answer" + " " * 30_000,
    "answers and newlines": "answer\n: " * 10_000,
    "answers and commands": "answer" + r"\a" * 15_000 + "answer" + "\\" + "a" * 15_000,
    "colons and spaces": ("answer" + " " * 50 + ":" + " " * 50) * 300,
    "digits and commas": "1," * 100_000,
    "minus signs": "-" * 100_000,
    "nested styles": r"\textcolor{red}{" * 100 + "7" + "}" * 100,
    "styles of nothing": r"\color{red}" * 180,
    "spaces after a style": r"\color" + " " * 1_900,
    "braces and spaces": "{   " * 490,
    "styles in braces": r"{\bf " * 390,
    "negations": r"\not" * 490,
    "degrees of nothing": "7^{" * 650,
    "overlined digits": "7\u0307" * 990,
    "raised digits": "⁷" * 1_900,
    "substitute characters": "\x1a" * 1_900,
    "Chinese ones": "一" * 1_900,
    "Chinese fractions": "百分之" * 600,
    "Chinese scales": "7万" * 900,
    "Chinese words": "个的是" * 600,
    "unknown Chinese": "鑫" * 1_900,
    "digits before Chinese": "7,7." * 480 + "元",
    "hundreds": "hundred " * 240,
    "number words": "seven " * 330,
    "parts": "7 per mille " * 160,
    "regular expression bomb": "a" * 1_900 + "!",
    "alternating words": "a b " * 450,
    "comma bomb": "1," * 900,
    "thousands bomb": "1,234" * 380,
    "division chain": "1/" * 900 + "1",
    "long sum": "1+" * 590 + "1",
    "product of powers": "(x+y+z+1)^{100000000}",
    "iterated powers": "(((x+1)^{200})^{200})^{200}",
    "sum of radicals": r"\sqrt{2}+" * 190 + "1",
    "exponential tower": "e^{e^{e^{e^{e}}}}",
    "huge angle": r"\cos(10^{400})",
    "pole": r"\tan(\frac{\pi}{2})",
    "division by zero": r"\frac{1}{0}",
    "zero to the zero": "0^0",
    "huge exponent": "1e999999999",
    "root of huge degree": r"\sqrt[1000000007]{2}",
    "functions alike near zero": r"\{" + ",".join(f"|x-{2000 + n}|-{n}" for n in range(64)) + r"\}",
    "functions too large": r"\cosh^{50}(x^9)-\sinh^{50}(x^9)",
    "set of radicals": r"\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(2, 66)) + r"\}",
    "import": "__import__('os').system('touch hostile')",
    "eval": "eval('9**9**9')",
    "subclasses": "().__class__.__bases__[0].__subclasses__()",
    "lambda": "(lambda: [0 for _ in iter(int, 1)])()",
    "format string": "{0.__class__}",
    "null bytes": "\x00" * 500,
    "surrogate": "\ud800",
    "combining marks": "a\u0301" * 900,
    "right to left": "\u202e5",
    "other digits": "٥",
}
GOLDS = ("5", r"\frac{1}{2}", r"\sqrt{2}", "x^2+1", "(1,2)", "1,2,3", "east", "B", "9^{9^9}")


def grade_everything(hostile: str) -> None:
    for gold in GOLDS:
        assert not is_equivalent(hostile, gold)
        assert not is_equivalent(gold, hostile)
    for response in (hostile, rf"\boxed{{{hostile}}}", f"</think> <answer>{hostile}</answer>"):
        assert question_only_reward_fn(response, "6")["reward"] == 0.0
        assert r1_zero_reward_fn(response, "6")["reward"] == 0.0
    parse_everything(hostile)


def parse_everything(text: str) -> None:
    """Give the text to every parser that the package exports: each returns a value or None."""
    for parse in (extract_answer_tag, extract_boxed, parse_gsm8k_response):
        assert isinstance(parse(text), str | None)
    letter = parse_mmlu_response({"options": ["east", "west", text[:100], "5"]}, text)
    assert letter in ("A", "B", "C", "D", None)
    assert isinstance(evaluate_arithmetic(text), Fraction | None)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_refused_at_once(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    started = time.monotonic()
    grade_everything(HOSTILE[name])
    assert time.monotonic() - started < HANG_SECONDS
    assert os.listdir() == []


@given(st.text(alphabet="answer is option:ABCD \n\t*$([{}])\\boxed0123456789.,-+/<>", max_size=400))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_a_parser_fail(text: str) -> None:
    parse_everything(text)
    parse_everything(text * 40)


def test_a_tower_too_large_to_compute_is_still_decided() -> None:
    assert is_equivalent(r"3 \cdot 9^{9^9}", r"3^{1+2\cdot 9^9}")
    assert is_equivalent(r"9^{9^{9^9}} \cdot 9", r"9 \cdot 9^{9^{9^{9}}}")
    assert not is_equivalent("9^{9^9}+1", "9^{9^9}")
    assert not is_equivalent("9^{9^{9^9}}", "9^{9^{9^8}}")


def test_verdicts_are_the_same_in_many_threads_at_once() -> None:
    pairs = [(r"\sqrt{12}", r"2\sqrt{3}", True), (r"\sin 30^\circ", "0.5", True), (r"\sqrt{3}", "1.732", False)]
    wrong: list[tuple[str, str]] = []

    def grade() -> None:
        for _ in range(50):
            wrong.extend((a, g) for a, g, expected in pairs if is_equivalent(a, g) is not expected)

    threads = [threading.Thread(target=grade) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_verdicts_are_the_same_after_a_fork() -> None:
    is_equivalent(r"\sqrt{12}", r"2\sqrt{3}")
    child = os.fork()
    if child == 0:
        right = is_equivalent(r"\sqrt{12}", r"2\sqrt{3}") and not is_equivalent(r"\sqrt{12}", r"3\sqrt{2}")
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_caller_deep_in_the_stack_gets_a_verdict() -> None:
    def descend(levels: int) -> bool:
        return is_equivalent("((((1))))+x", "x+1") if levels == 0 else descend(levels - 1)

    depth = 0
    try:
        while depth < 5_000:
            descend(depth)
            depth += 50
    except RecursionError as error:  # the test's own recursion, never the judge's
        assert "descend" in str(error.__traceback__.tb_next.tb_frame.f_code.co_name)  # type: ignore[union-attr]
