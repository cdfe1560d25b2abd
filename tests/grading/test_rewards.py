"""The two reward functions: formats, extraction, and answers that hedge between candidates."""

import pytest

from veritune.grading import (
    evaluate_arithmetic,
    extract_answer_tag,
    extract_boxed,
    parse_gsm8k_response,
    parse_mmlu_response,
    question_only_reward_fn,
    question_only_score,
    r1_zero_reward_fn,
    r1_zero_score,
)

RIGHT = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
WRONG = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
UNFORMATTED = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("thought</think> <answer>72</answer>", RIGHT),
        ("thought</think>\n<answer>72</answer>", RIGHT),
        ("thought</think><answer>72</answer>", RIGHT),
        ("thought</think> \n\n <answer> 72 </answer> and more", RIGHT),
        (r"thought</think> <answer>\boxed{72}</answer>", RIGHT),
        ("<think>a</think> b </think> <answer>$72$</answer>", RIGHT),
        ("I might say <answer>5</answer> ... </think> <answer>72</answer>", RIGHT),
        ("</think> <answer>72</answer> <answer>72.0</answer>", RIGHT),
        ("</think> <answer>71</answer>", WRONG),
        ("</think> <answer></answer>", WRONG),
        ("</think> <answer>71 or 72</answer>", WRONG),
        ("</think> <answer>71</answer> <answer>72</answer>", WRONG),
        ("</think> <answer>72</answer> <answer>71</answer>", WRONG),
        ("</think> <answer>72</answer> <answer>71", WRONG),
        (r"</think> <answer>\boxed{72} \boxed{71}</answer>", WRONG),
        (r"</think> <answer>\boxed{71} \boxed{72}</answer>", WRONG),
        ("</think> <answer>72</answer>" + " <answer>72</answer>" * 100, WRONG),
        ("</think> so <answer>72</answer>", UNFORMATTED),
        ("<answer>72</answer>", UNFORMATTED),
        ("</think> 72", UNFORMATTED),
        ("</think> <answer>72", UNFORMATTED),
        ("<answer>72</answer></think>", UNFORMATTED),
        ("72", UNFORMATTED),
        ("", UNFORMATTED),
        (r"\boxed{72}", UNFORMATTED),
    ],
)
def test_r1_zero(response: str, expected: dict[str, float]) -> None:
    assert r1_zero_reward_fn(response, "72") == expected


@pytest.mark.parametrize(("between", "format_reward"), [(" ", 1.0), ("", 0.0), ("\n", 0.0), ("  ", 0.0), (" \n", 0.0)])
def test_strict_format_demands_the_single_space(between: str, format_reward: float) -> None:
    response = f"thought</think>{between}<answer>72</answer>"
    assert r1_zero_reward_fn(response, "72", strict_format=True)["format_reward"] == format_reward
    assert r1_zero_reward_fn(response, "72")["format_reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{72}", RIGHT),
        (r"so \boxed {72}.", RIGHT),
        (r"\boxed{} as asked: \boxed{72}", RIGHT),
        (r"\boxed{x = 72}, that is \boxed{72}", RIGHT),
        (r"\boxed{\boxed{72}}", RIGHT),
        (r"\boxed{72} \text{ clips}", RIGHT),
        (r"so \boxed{71}", WRONG),
        (r"\boxed{71} no, \boxed{72}", WRONG),
        (r"\boxed{72} no, \boxed{71}", WRONG),
        (r"\boxed{71, 72}", WRONG),
        (r"\boxed{}", WRONG),
        (r"\boxed{72", UNFORMATTED),
        (r"\boxed 72", UNFORMATTED),
        ("72", UNFORMATTED),
        ("</think> <answer>72</answer>", UNFORMATTED),
    ],
)
def test_question_only(response: str, expected: dict[str, float]) -> None:
    assert question_only_reward_fn(response, "72") == expected


@pytest.mark.parametrize("ground_truth", ["72", 72, 72.0, ["71", "72"], ["72"], r"\boxed{72}"])
def test_ground_truths_of_every_type(ground_truth: object) -> None:
    assert question_only_reward_fn(r"\boxed{72}", ground_truth) == RIGHT
    assert question_only_reward_fn(r"\boxed{73}", ground_truth) == WRONG


def test_a_score_says_what_was_judged_and_why() -> None:
    score = r1_zero_score(r"</think> <answer> \frac{144}{2} </answer>", "72")
    assert (score.reward, score.extracted, score.rule) == (1.0, r"\frac{144}{2}", "value")
    assert score.seconds > 0
    assert r1_zero_score("72", "72").rule == "format"
    assert r1_zero_score("</think> <answer>1</answer><answer>2</answer>", "2").rule == "contradicting answers"
    score = question_only_score(r"\boxed{5 \text{ cm}}", r"5 \text{ m}")
    assert (score.reward, score.rule) == (0.0, "unit")


def test_extractors() -> None:
    assert extract_boxed(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\frac{1}{2}"
    assert extract_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert extract_boxed(r"\boxed{1} \boxed{2") is None
    assert extract_boxed("none") is None
    assert extract_answer_tag("x</think> <answer>a</answer>") == "a"
    assert extract_answer_tag("x <answer>a</answer>") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May, and 48+24 = 72 clips in all.", "72"),
        ("It costs $1,234.50.", "1234.50"),
        ("The temperature is -5 degrees", "-5"),
        ("48-24", "24"),
        ("#### 18", "18"),
        ("half is .5", ".5"),
        ("1, 2, 3.", "3"),
        ("twenty-four clips", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_gsm8k_response(text: str, number: str | None) -> None:
    assert parse_gsm8k_response(text) == number


MMLU_EXAMPLE = {"question": "How many?", "options": ["100", "1", "10", "unknown"], "answer": "A"}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is B. There is only one, which is A virus.", "B"),
        ("The answer is (C)", "C"),
        ("answer: d", "D"),
        ("The answer is a virus", None),
        (r"The answer is \textbf{(C)}", "C"),
        ("The answer is **B**.", "B"),
        ("B", "B"),
        ("(D)", "D"),
        ("**A**", "A"),
        ("C. Because of this", "C"),
        ("unknown", "D"),
        ("I would pick B here", "B"),
        ("The correct answer is 10000 viruses.", None),
        ("The answer is E", None),
        ("Either B or C", None),
        ("", None),
    ],
)
def test_the_letter_of_an_mmlu_response(text: str, letter: str | None) -> None:
    assert parse_mmlu_response(MMLU_EXAMPLE, text) == letter


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3 + 5) / 6", "4/3"),
        ("1-2-3", "-4"),
        ("8/4/2", "1"),
        ("95 - 5 * (18 / 6)", "80"),
        ("-(3-5)", "2"),
        ("2*-3", "-6"),
        (" 7 ", "7"),
        ("1+" * 300 + "1", "301"),
    ],
)
def test_plain_arithmetic(text: str, value: str) -> None:
    assert str(evaluate_arithmetic(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "()",
            "3+",
            "*3",
            "2(3)",
            "(2)(3)",
            "2*3(4)",
            "2**3",
            "7//2",
            "1 2",
            "1 1/2",
            "1.5",
            "1,000",
            "x",
            "2^3",
        ),
        *(
            "3=3",
            "1/0",
            "5-5/(3-3)",
            "3×4",
            "3−1",
            "٣",
            "5%",
            "[1]",
            "(1",
            "1)",
            "5!",
            "1e3",
            "0x1",
            "1_000",
            "3 + 5 = 8",
        ),
        *("(" * 200 + "1" + ")" * 200, "1+" * 600 + "1", "9" * 400, "__import__('os')", "int(3)", "\x00"),
    ],
)
def test_what_is_no_plain_arithmetic(text: str) -> None:
    assert evaluate_arithmetic(text) is None
