"""Verifiers, reward, generator and task of Countdown; equations are checked against trees evaluated here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.config import CommonConfig
from veritune.core.errors import ConfigError, DataError
from veritune.tasks import load_task
from veritune.tasks.countdown import (
    CountdownTask,
    Problem,
    _evaluate_equation,
    _extract_answer,
    _validate_numbers,
    evaluate_equation,
    extract_answer,
    generate_problems,
    read_problems,
    reward_fn,
    score_response,
    solutions,
    split_of,
    validate_numbers,
)

TRUTH = {"numbers": [9, 5, 18], "target": 4}


# Verifiers


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>1 + 2</answer>", "1 + 2"),
        ("<think>x</think> <answer>\n (3)\t</answer> and more", "(3)"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>1</answer> </answer>", "1"),
        ("<answer>first <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("<answer>1\n+\n2</answer>", "1\n+\n2"),
        ("</answer>1<answer>", None),
        ("<answer>1", None),
        ("1</answer>", None),
        ("<ANSWER>1</ANSWER>", None),
        ("< answer>1</answer>", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_complete_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "equation, numbers, valid",
    [
        ("(64 + 14) - 16", [64, 14, 16, 7], True),
        ("(7 + 7) + 7", [7, 7, 65], False),
        ("10 + 9", [10, 8, 2], False),
        ("7 + 7", [7, 7, 65], True),
        ("7 + 7", [7, 65], False),
        ("1 + 2", [12], False),
        ("12", [1, 2], False),
        ("1 + 2", (2, 1), True),
        ("07 + 1", [7, 1], True),
        ("", [1], False),
        ("x + y", [1], False),
        ("1" * 100_000, [1], False),
        (None, [1], False),
    ],
)
def test_each_number_may_be_used_at_most_once(equation, numbers, valid):
    assert validate_numbers(equation, numbers) is valid


@pytest.mark.parametrize(
    "text, value",
    [
        ("(18 - 9) - 5", 4.0),
        ("7 / 2", 3.5),
        ("2 + 3 * 4", 14.0),
        ("8 / 4 / 2", 1.0),
        ("8 - 4 - 2", 2.0),
        (" ( 1 ) ", 1.0),
        ("-(3 - 5)", 2.0),
    ],
)
def test_equations_are_evaluated(text, value):
    assert evaluate_equation(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("2(3)", "(2)(3)", "2 3", "2**3", "7//2", "7%2", "1/0", "1/(2-2)", "3−2", "3×2", "6÷2", "２+1", "٣", "1.5"),
        *("1e3", "0x10", "1_000", "", " ", "()", "(1", "1)", "1+", "*1", "1+2=3", "abs(1)", "__import__('os')", "[1]"),
        *("+".join("1" * 100_000), "(" * 500 + "1" + ")" * 500, "9" * 5000, "*".join(["9" * 100] * 9), None),
    ],
)
def test_everything_else_is_no_equation(text):
    assert evaluate_equation(text) is None


@st.composite
def equation_trees(draw, depth=3):
    """An equation's text, its exact value (None for a division by zero), and its numbers."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 99))
        return str(number), Fraction(number), [number]
    left_text, left, left_numbers = draw(equation_trees(depth - 1))
    right_text, right, right_numbers = draw(equation_trees(depth - 1))
    operator, space = draw(st.sampled_from("+-*/")), draw(st.sampled_from(["", " "]))
    value = None
    if left is not None and right is not None and not (operator == "/" and right == 0):
        value = {"+": left + right, "-": left - right, "*": left * right}.get(operator)
        value = left / right if value is None else value
    return f"({left_text}{space}{operator}{space}{right_text})", value, left_numbers + right_numbers


@settings(deadline=None, max_examples=200)
@given(equation_trees(), st.integers(0, 99))
def test_verifiers_and_reward_agree_with_the_tree_that_the_text_came_from(tree, other):
    text, value, numbers = tree
    assert evaluate_equation(text) == (None if value is None else float(value))
    assert validate_numbers(text, numbers) and validate_numbers(text, [other, *numbers])
    assert not validate_numbers(text, numbers[1:])
    response = f"<answer>{text}</answer>"
    if value is not None and value.denominator == 1:
        assert reward_fn(response, {"numbers": numbers, "target": int(value)}) == 1.0
        assert reward_fn(response, {"numbers": numbers, "target": int(value) + 1}) == 0.1
    assert reward_fn(response, {"numbers": numbers[1:], "target": 5}) == 0.1


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="0123456789+-*/() <answer>/.e_²½٣", max_size=80))
def test_no_text_makes_a_verifier_or_the_reward_raise(text):
    validate_numbers(text, [1, 2])
    evaluate_equation(text)
    assert reward_fn(text, TRUTH) in (0.0, 0.1, 1.0)
    assert reward_fn(f"<answer>{text}</answer>", TRUTH) in (0.1, 1.0)


# Reward


@pytest.mark.parametrize(
    "response, reward, rule",
    [
        ("9-5=4</think> <answer>(18-9)-5</answer>", 1.0, "correct"),
        ("<answer>9-5</answer>", 1.0, "correct"),  # a subset is allowed
        ("<answer>18-9-5 = 4</answer>", 0.1, "no_equation"),
        ("<answer>18-9</answer>", 0.1, "value"),
        ("<answer>4</answer>", 0.1, "numbers"),
        ("<answer>9-5+5-5</answer>", 0.1, "numbers"),
        ("<answer></answer>", 0.1, "no_equation"),
        ("<answer>(18-9)-5", 0.0, "no_answer_tag"),
        ("(18-9)-5", 0.0, "no_answer_tag"),
        ("", 0.0, "no_answer_tag"),
    ],
)
def test_reward_and_the_rule_that_decided(response, reward, rule):
    assert reward_fn(response, TRUTH) == reward
    score = score_response(response, TRUTH)
    assert (score.reward, score.rule) == (reward, rule)
    assert score.format_reward == (0.0 if rule == "no_answer_tag" else 1.0)
    assert score.answer_reward == (1.0 if rule == "correct" else 0.0)
    assert score.extracted == extract_answer(response)


def test_all_numbers_can_be_required():
    assert reward_fn("<answer>9-5</answer>", TRUTH, require_all_numbers=True) == 0.1
    assert score_response("<answer>9-5</answer>", TRUTH, require_all_numbers=True).rule == "unused_number"
    assert reward_fn("<answer>18-9-5</answer>", TRUTH, require_all_numbers=True) == 1.0


def test_values_are_compared_exactly():
    thirds = {"numbers": [1, 3, 3], "target": 1}
    assert reward_fn("<answer>1/3*3</answer>", thirds) == 1.0
    assert reward_fn("<answer>7/2</answer>", {"numbers": [7, 2], "target": 3.5}) == 1.0
    assert reward_fn("<answer>1/10</answer>", {"numbers": [1, 10], "target": 0.1}) == 1.0
    near = {"numbers": [10**15, 3, 10**15 + 1], "target": 3}
    assert reward_fn(f"<answer>{10**15 + 1}*3/{10**15}</answer>", near) == 0.1  # 3.000000000000003


@pytest.mark.parametrize(
    "ground_truth",
    [
        {"nums": [9, 5, 18], "target": 4},
        {"numbers": [9, 5, 18]},
        {"numbers": None, "target": 4},
        {"numbers": ["9"], "target": 4},
        {"numbers": "9 5 18", "target": 4},
        {"numbers": [9], "target": None},
        {"numbers": [9], "target": "4"},
        {"numbers": [9], "target": float("nan")},
        {},
        None,
        "4",
    ],
)
@pytest.mark.parametrize("response", ["", "<answer>9-5</answer>"])
def test_a_broken_ground_truth_is_an_error_and_not_a_low_score(ground_truth, response):
    with pytest.raises(DataError, match="ground truth is"):
        reward_fn(response, ground_truth)


@pytest.mark.parametrize(
    "response, reward",
    [
        ("<answer>" * 500_000, 0.0),
        ("</answer>" * 500_000, 0.0),
        ("<answer>1</answer>" * 200_000, 0.1),
        ("<answer>" + "1+" * 1_000_000 + "1</answer>", 0.1),
        ("<answer>" + "(" * 1_000_000 + "</answer>", 0.1),
        ("<answer>" + "9" * 1_000_000 + "</answer>", 0.1),
    ],
)
def test_huge_responses_are_graded_at_once(response, reward):
    start = time.perf_counter()
    assert reward_fn(response, TRUTH) == reward
    assert time.perf_counter() - start < 5


def test_the_underscored_names_are_the_same_functions():
    assert (_extract_answer, _validate_numbers, _evaluate_equation) == (
        extract_answer,
        validate_numbers,
        evaluate_equation,
    )


# Solver and generator


def reachable_by_brute_force(numbers: list[int]) -> set[int]:
    """What three numbers make with steps through integers from 0 up, over every order, operator and bracketing."""
    values = set()
    operations = [
        lambda a, b: a + b,
        lambda a, b: a - b if a >= b else None,
        lambda a, b: a * b,
        lambda a, b: a // b if b and a % b == 0 else None,
    ]
    for (a, b, c), outer, inner in itertools.product(itertools.permutations(numbers), operations, operations):
        for left in (True, False):
            step = inner(a, b) if left else inner(b, c)
            if step is not None:
                values.add(outer(step, c) if left else outer(a, step))
    return values - {None}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.integers(0, 100))
def test_the_solver_finds_a_solution_exactly_where_brute_force_does(numbers, target):
    found = list(solutions(numbers, target))
    assert bool(found) == (target in reachable_by_brute_force(numbers))
    assert len(set(found)) == len(found)
    for equation in found:
        assert reward_fn(f"<answer>{equation}</answer>", {"numbers": numbers, "target": target}, True) == 1.0


@pytest.mark.parametrize("split, numbers", [("train", 3), ("train", 4), ("validation", 3), ("validation", 4)])
def test_generated_problems_are_solvable_with_all_their_numbers(split, numbers):
    problems = generate_problems(150, seed=1, split=split, numbers=numbers)
    assert len({(tuple(sorted(problem.numbers)), problem.target) for problem in problems}) == 150
    for problem in problems:
        assert len(problem.numbers) == numbers
        assert all(1 <= number <= 20 for number in problem.numbers) and 1 <= problem.target <= 100
        gold = next(solutions(problem.numbers, problem.target))
        assert (
            reward_fn(f"<answer>{gold}</answer>", {"numbers": problem.numbers, "target": problem.target}, True) == 1.0
        )


def test_every_gold_of_the_held_out_task_scores_one():
    task = CountdownTask(validation_problems=512, require_all_numbers=True)
    for example in task.examples("validation"):
        gold = next(solutions(example.ground_truth["numbers"], example.ground_truth["target"]))
        assert task.rewards([(f" </think> <answer> {gold} </answer>", example.ground_truth)])[0].reward == 1.0


def test_splits_never_share_a_multiset_whatever_the_seed():
    def multisets(seed, split):
        return {tuple(sorted(problem.numbers)) for problem in generate_problems(2000, seed, split)}

    assert not (multisets(0, "train") | multisets(1, "train")) & (
        multisets(0, "validation") | multisets(2, "validation")
    )


def test_the_split_is_stable_across_orders_processes_and_about_one_in_five():
    every = list(itertools.combinations_with_replacement(range(1, 21), 3))
    held_out = [multiset for multiset in every if split_of(multiset) == "validation"]
    assert 0.15 < len(held_out) / len(every) < 0.25
    assert all(split_of(order) == "validation" for order in itertools.permutations(held_out[0]))
    program = "from veritune.tasks.countdown import *; print(split_of([9, 5, 18]), generate_problems(2, 7, 'train'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{split_of([18, 9, 5])} {generate_problems(2, 7, 'train')}\n"}


def test_generation_follows_its_seed_and_a_smaller_count_is_a_prefix():
    assert generate_problems(20, 3, "train") == generate_problems(50, 3, "train")[:20]
    assert generate_problems(20, 3, "train") != generate_problems(20, 4, "train")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"count": 0}, "count is 0; it must be at least 1"),
        ({"split": "test"}, "split is 'test'; allowed are train, validation"),
        ({"numbers": 5}, "numbers is 5; it must be 3 or 4"),
        ({"max_number": 0}, "max_number is 0"),
        ({"max_target": 0}, "max_target is 0"),
        ({"count": 40, "max_number": 1, "max_target": 3}, "count is 40; these settings have no more than about"),
    ],
)
def test_impossible_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        generate_problems(**{"count": 1, "seed": 0, "split": "train", **changes})


# Files


def write_rows(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_in_the_public_form_is_split_by_its_multisets(tmp_path, suffix):
    rows = [{"nums": list(order), "target": 24} for order in itertools.permutations([3, 7, 11])]
    rows += [{"nums": [a, a + 1, 50, 60], "target": 10 + a} for a in range(1, 60)]
    path = write_rows(tmp_path / f"problems{suffix}", rows)
    assert read_problems(path) == [Problem(tuple(row["nums"]), row["target"]) for row in rows]
    task = CountdownTask(data=path)
    train, validation = task.examples("train"), task.examples("validation")
    assert len(train) + len(validation) == len(rows) and train and validation
    sorted_numbers = [{tuple(sorted(e.ground_truth["numbers"])) for e in split} for split in (train, validation)]
    assert not sorted_numbers[0] & sorted_numbers[1]


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"nums": [1, 2], "target": ', "line 2: not valid JSON"),
        ('{"nums": [1, 2]}', "line 2: 'target' is missing; the row has 'nums'"),
        ('{"numbers": [1, 2], "target": 3}', "line 2: 'nums' is missing"),
        ('{"nums": [1, "2"], "target": 3}', "line 2: 'nums' is"),
        ('{"nums": [], "target": 3}', "line 2: 'nums' is"),
        ('{"nums": [1, true], "target": 3}', "line 2: 'nums' is"),
        ('{"nums": [1, -2], "target": 3}', "line 2: 'nums' is"),
        ('{"nums": 12, "target": 3}', "line 2: 'nums' is 12"),
        ('{"nums": [1, 2], "target": 3.5}', "line 2: 'target' is 3.5"),
        ('{"nums": [1, 2], "target": "3"}', "line 2: 'target' is '3'"),
        ("[1, 2]", "line 2: the row is"),
        ("[" * 100_000, "line 2: not valid JSON"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, row, message):
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"nums": [1, 2], "target": 3}}\n{row}\n')
    with pytest.raises(DataError, match=message) as caught:
        read_problems(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"nums": [1, 2], "target": 3}\n{"nums": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        read_problems(path)


def test_broken_and_empty_files_are_named(tmp_path):
    pytest.importorskip("pyarrow")
    empty, junk, other = tmp_path / "empty.jsonl", tmp_path / "junk.parquet", tmp_path / "problems.csv"
    empty.write_text("\n\n")
    junk.write_bytes(b"not a parquet file")
    other.write_text("nums,target")
    broken_row = write_rows(tmp_path / "row.parquet", [{"nums": [1], "target": 1}, {"nums": None, "target": 1}])
    for path, message in [
        (empty, "has no rows"),
        (junk, "not a readable Parquet file"),
        (other, "'.csv' are not read"),
        (broken_row, "row 2: 'nums' is None"),
        (tmp_path / "missing.jsonl", "no such file"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read_problems(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_split_without_rows_is_an_error(tmp_path):
    path = write_rows(tmp_path / "one.jsonl", [{"nums": [9, 5, 18], "target": 4}])
    owner = split_of([9, 5, 18])
    other = "train" if owner == "validation" else "validation"
    assert len(CountdownTask(data=path).examples(owner)) == 1
    with pytest.raises(DataError, match=f"none of its rows belongs to the {other} split"):
        CountdownTask(data=path).examples(other)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "problems.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'veritune\[parquet\]'"):
        read_problems(path)


# The task


def test_the_compact_prompt_and_the_shape_of_an_example():
    task = CountdownTask(train_problems=3, validation_problems=2)
    train, validation = task.examples("train"), task.examples("validation")
    assert [example.id for example in train] == ["countdown-train-0", "countdown-train-1", "countdown-train-2"]
    assert len(validation) == 2
    numbers, target = train[0].ground_truth["numbers"], train[0].ground_truth["target"]
    assert task.prompt(train[0]) == f"Use {numbers[0]}, {numbers[1]}, {numbers[2]} to make {target}.\n<think>\n"
    assert (task.name, task.stop) == ("countdown", ("</answer>",))
    with pytest.raises(ConfigError, match="split is 'test'"):
        task.examples("test")


def test_other_prompts_take_the_question(tmp_path):
    example = CountdownTask(train_problems=1).examples("train")[0]
    r1_zero = load_task(CommonConfig(prompt="r1_zero")).prompt(example)
    assert r1_zero.endswith(f"\nUser: {example.question}\nAssistant: <think>")
    own = tmp_path / "own.txt"
    own.write_text("{braces} {question} {}\n")
    assert load_task(CommonConfig(prompt=str(own))).prompt(example) == f"{{braces}} {example.question} {{}}\n"
    with pytest.raises(ConfigError, match="prompt is 'nonsense'"):
        load_task(CommonConfig(prompt="nonsense"))
