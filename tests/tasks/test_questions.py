"""GSM8K, MATH and tables of questions: golds, splits, prompts, rewards and limits."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veritune.core.config import CommonConfig, from_mapping
from veritune.core.errors import ConfigError, DataError
from veritune.core.types import Score
from veritune.tasks import load_task
from veritune.tasks.countdown import CountdownTask
from veritune.tasks.data_files import Place
from veritune.tasks.questions import (
    SAMPLES,
    boxed_answer,
    gsm8k_row,
    math_row,
    question_key,
    short_gold,
    split_of,
)
from veritune.tasks.rewards import REWARDS, Reward, grading_pool, reward_of_template, settle_r1_zero_strict

PLACE = Place("x.jsonl", "line", 7)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(told=None, **values):
    """The task of a config; settings that are not every run's are the task's own."""
    common = {field.name for field in dataclasses.fields(CommonConfig)}
    named = {name if name in common else f"task.{name}": value for name, value in values.items()}
    return load_task(from_mapping(CommonConfig, named, "test"), ([] if told is None else told).append)


# Golds


@pytest.mark.parametrize(
    "value, gold",
    [
        ("She has 3*4=<<3*4=12>>12.\n#### 12", "12"),
        ("#### 1\nno, wait\n#### -3/4 ", "-3/4"),
        (r"so $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{ \{1,2\} }", r"\{1,2\}"),
        (r"thus $\fbox{7}$", "7"),
        (r"we get $\boxed 9$.", "9"),
        (r"it is \boxed\frac12", r"it is \boxed\frac12"),
        ("  70,000 ", "70,000"),
        (5, 5),
        (0.5, 0.5),
        (10**20, 10**20),
        (["1/2", "0.5", 0.5], ["1/2", "0.5", 0.5]),
        ([r"\boxed{3}", "#### 4"], ["3", "4"]),
    ],
)
def test_a_gold_is_kept_in_its_short_form(value, gold):
    assert short_gold(value, "answer", PLACE) == gold


@pytest.mark.parametrize(
    "value", [None, "", " \n", "Thus\n#### ", r"\boxed{}", True, float("nan"), float("inf"), [], [[1]], ["1", None], {}]
)
def test_what_is_no_gold_is_refused_by_place_and_column(value):
    with pytest.raises(DataError, match=r"^x.jsonl line 7: 'final' is .*; it must be text with an answer in it"):
        short_gold(value, "final", PLACE)


@given(st.text(alphabet="0123456789x+/{}\\ fracsqt", min_size=1).map(str.strip).filter(bool))
def test_a_balanced_answer_survives_its_box(answer):
    depths = [answer[: end + 1].count("{") - answer[: end + 1].count("}") for end in range(len(answer))]
    if min(depths) >= 0 and depths[-1] == 0 and not re.search(r"\\[{}]|\\$", answer):
        assert boxed_answer(f"Therefore $x = \\boxed{{{answer}}}$.") == answer


def test_the_rows_of_gsm8k():
    example = gsm8k_row({"question": "How many?", "answer": "1,000*2=<<1000*2=2000>>2,000\n#### 2,000"}, PLACE)
    assert (example.id, example.question, example.ground_truth) == ("7", "How many?", "2000")
    for row, message in [
        ({"question": "q", "answer": "72"}, "'answer' is '72'; it must end with #### and a number"),
        ({"question": "q", "answer": "#### many"}, "'answer' has no number after its last ####"),
        ({"question": "q", "answer": 72}, "'answer' is 72; it must be text"),
        ({"question": "", "answer": "#### 1"}, "'question' is ''"),
        ({"answer": "#### 1"}, "'question' is missing"),
    ]:
        with pytest.raises(DataError, match=f"^x.jsonl line 7: {re.escape(message)}"):
            gsm8k_row(row, PLACE)


def test_the_rows_of_math():
    solved = {"problem": "p", "solution": r"\boxed{1}, no: \boxed{\sqrt{2}}", "type": "Algebra", "level": "Level 5"}
    example = math_row(solved, PLACE)
    assert (example.question, example.ground_truth) == ("p", r"\sqrt{2}")
    assert example.meta == {"type": "Algebra", "level": "Level 5"}
    assert math_row({"question": "q", "answer": 4, "solution": "none"}, PLACE).ground_truth == 4
    assert math_row({**solved, "answer": ""}, PLACE).ground_truth == r"\sqrt{2}"
    assert math_row({**solved, "answer": None}, PLACE).ground_truth == r"\sqrt{2}"
    for row, message in [
        ({"problem": "p"}, "'answer' and 'solution' are missing; the row has 'problem'"),
        ({"problem": "p", "solution": "so 4"}, r"'solution' has no \boxed{}"),
        ({"problem": "p", "solution": r"\boxed{4"}, r"'solution' has no \boxed{}"),
        ({"answer": "4"}, "'question' is missing"),
    ]:
        with pytest.raises(DataError, match=f"^x.jsonl line 7: {re.escape(message)}"):
            math_row(row, PLACE)


# The shipped samples


@pytest.mark.parametrize("name, rows", [("gsm8k", 40), ("math", 32)])
def test_every_gold_of_a_sample_scores_one_against_itself_in_every_format(name, rows):
    told = []
    task = load(told, task=name)
    examples = [*task.examples("train"), *task.examples("validation")]
    assert told == [f"task {name} was given no data: its problems are the small sample that Veritune ships"]
    assert len(examples) == len({example.id for example in examples}) == rows
    for example in examples:
        gold = example.ground_truth
        tagged, boxed = f"so </think> <answer> {gold} </answer>", f"so \\boxed{{{gold}}}."
        assert task.rewards([(tagged, gold)])[0].reward == 1.0, gold
        assert REWARDS["r1_zero_strict"].score(tagged, gold).reward == 1.0, gold
        assert REWARDS["question_only"].score(boxed, gold).reward == 1.0, gold
        assert task.rewards([(tagged.replace("</think>", ""), gold)])[0].rule == "format"


def value_of(node):
    if isinstance(node, ast.UnaryOp):
        return -value_of(node.operand)
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    left, right = value_of(node.left), value_of(node.right)
    operations = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
    return operations[type(node.op)] if type(node.op) in operations else left / right


def test_the_worked_solutions_of_the_sample_are_right():
    for line in (SAMPLES / "gsm8k.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps = re.findall(r"<<(.+?)=(-?[\d.]+)>>", row["answer"])
        for expression, result in steps:
            assert value_of(ast.parse(expression, mode="eval").body) == Fraction(result), row
        assert Fraction(steps[-1][1]) == Fraction(row["answer"].split("#### ")[1].replace(",", "")), row


# Splits


def table_of(count, start=0):
    return [{"question": f"What is {n}+{n}?", "answer": f"#### {2 * n}"} for n in range(start, start + count)]


def test_one_file_is_split_by_its_questions_whatever_their_spelling(tmp_path):
    rows = table_of(1000)
    copies = [{**row, "question": "  WHAT\u00a0is " + row["question"][8:] + "\n"} for row in rows]
    task = load(task="gsm8k", data=write(tmp_path / "rows.jsonl", rows + copies))
    train, validation = task.examples("train"), task.examples("validation")
    assert len(train) + len(validation) == 2000 and 140 < len(validation) < 260
    assert not {question_key(e.question) for e in train} & {question_key(e.question) for e in validation}
    assert all(split_of(example.question) == "validation" for example in validation)
    again = load(task="gsm8k", data=write(tmp_path / "less.jsonl", rows[500:]))
    kept = {example.question for example in validation}
    assert {example.question for example in again.examples("validation")} == kept & {r["question"] for r in rows[500:]}
    assert train[0].id == "gsm8k-train-1" or validation[0].id == "gsm8k-validation-1"


def test_the_split_is_the_same_in_another_process():
    questions = [row["question"] for row in table_of(50)]
    program = f"from veritune.tasks.questions import split_of; print([split_of(q) for q in {questions!r}])"
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "5", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.strip() == str([split_of(question) for question in questions])


def test_two_files_are_the_two_splits_without_what_both_ask(tmp_path):
    data, held_out = write(tmp_path / "a.jsonl", table_of(30)), write(tmp_path / "b.jsonl", table_of(10, start=25))
    told = []
    task = load(told, task="gsm8k", data=data, validation_data=held_out)
    assert [example.ground_truth for example in task.examples("train")] == [str(2 * n) for n in range(25)]
    assert [example.ground_truth for example in task.examples("validation")] == [str(2 * n) for n in range(25, 35)]
    assert told == [f"{data}: 5 questions are left out, because {held_out} asks them too"]


def test_held_out_problems_alone_leave_nothing_to_train_on(tmp_path):
    told = []
    task = load(told, task="gsm8k", validation_data=write(tmp_path / "b.jsonl", table_of(10)))
    assert len(task.examples("validation")) == 10 and told == []
    with pytest.raises(DataError, match="task gsm8k has no train examples; give data as well"):
        task.examples("train")
    with pytest.raises(ConfigError, match="split is 'test'; allowed are train, validation"):
        task.examples("test")


def test_a_file_too_small_to_hold_anything_out_says_what_to_give(tmp_path):
    row = next(row for row in table_of(100) if split_of(row["question"]) == "train")
    with pytest.raises(DataError, match="no validation examples; give validation_data as well"):
        load(task="gsm8k", data=write(tmp_path / "one.jsonl", [row])).examples("validation")


def test_bad_rows_are_refused_or_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*table_of(20), {"question": "q", "answer": "no mark"}, {}])
    with pytest.raises(DataError, match=r"rows.jsonl line 21: 'answer' is 'no mark'"):
        load(task="gsm8k", data=path).examples("train")
    told = []
    task = load(told, task="gsm8k", data=path, skip_bad_rows=True)
    assert len(task.examples("train")) + len(task.examples("validation")) == 20
    (line,) = told
    assert line.startswith(f"{path}: 2 of 22 rows are left out; the first: {path} line 21: 'answer'")


def test_any_table_with_named_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"Frage": f"Was ist {n}?", "Antwort": f"\\boxed{{{n}}}", "rest": [n]} for n in range(40)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = {"task": "file", "data": tmp_path / "rows.parquet", "question_column": "Frage"}
    task = load(**settings, answer_column="Antwort")
    examples = [*task.examples("train"), *task.examples("validation")]
    assert {(e.question, e.ground_truth) for e in examples} == {(f"Was ist {n}?", str(n)) for n in range(40)}
    with pytest.raises(DataError, match=r"row 1: 'answer' is missing; the row has 'Frage', 'Antwort', 'rest'"):
        load(**settings).examples("train")
    with pytest.raises(ConfigError, match="task file needs data or validation_data"):
        load(task="file").examples("train")


# Prompts and rewards


def test_the_reward_follows_the_prompt_or_is_said(tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("Box it. {question}")
    example = load(task="gsm8k").examples("train")[0]
    for settings, stop, right in [
        ({}, ("</answer>",), "</think> <answer>{}</answer>"),
        ({"prompt": "compact"}, ("</answer>",), "</think> <answer>{}</answer>"),
        ({"prompt": "question_only"}, (), "\\boxed{{{}}}"),
        ({"prompt": str(own)}, (), "\\boxed{{{}}}"),
        ({"prompt": str(own), "reward": ("r1_zero",)}, ("</answer>",), "</think> <answer>{}</answer>"),
        ({"reward": ("question_only",)}, (), "\\boxed{{{}}}"),
        ({"chat": True}, (), "\\boxed{{{}}}"),
        ({"chat": True, "prompt": "r1_zero"}, ("</answer>",), "</think> <answer>{}</answer>"),
    ]:
        task = load(task="gsm8k", **settings)
        assert task.stop == stop, settings
        (score,) = task.rewards([(right.format(example.ground_truth), example.ground_truth)])
        assert score.reward == 1.0, settings
    assert reward_of_template("{question} <think>") == "r1_zero" and reward_of_template("{question}") == "question_only"


def test_the_strict_format_wants_one_space_between_the_tags():
    strict = load(task="gsm8k", reward=("r1_zero_strict",))
    lenient = load(task="gsm8k")
    for between, reward in [(" ", 1.0), ("\n", 0.0), ("", 0.0), ("  ", 0.0)]:
        response = f"so </think>{between}<answer> 5 </answer>"
        assert [task.rewards([(response, "5")])[0].reward for task in (strict, lenient)] == [reward, 1.0]
        settled = settle_r1_zero_strict(response, "5")
        assert settled is None if reward else settled.rule == "format"


def test_every_task_has_its_own_prompt_and_a_question_may_hold_braces(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "What is {x} in {question}?", "answer": 1}])
    task = load(task="file", validation_data=path)
    (example,) = task.examples("validation")
    assert task.prompt(example).endswith("\nUser: What is {x} in {question}?\nAssistant: <think>")
    assert load(task="countdown").template == "compact"
    assert load(task="countdown", chat=True).template == "countdown_instruct"
    assert load(task="math", chat=True).template == "question_only"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"task": "gsm9k"}, "task is 'gsm9k'; allowed are countdown, gsm8k, math, file"),
        ({"task": "countdown", "skip_bad_rows": True}, "task countdown: unknown setting 'task.skip_bad_rows'"),
        ({"task": "gsm8k", "question_column": "q"}, "task gsm8k: unknown setting 'task.question_column'"),
        ({"task": "math", "numbers": 4}, "task math: unknown setting 'task.numbers'; allowed are task.data"),
        ({"task": "math", "prompt": "nonsense"}, "prompt is 'nonsense'; it must be one of"),
        (
            {"task": "math", "data": Path("a"), "validation_data": Path("a")},
            "task.validation_data is .*; it must be another source",
        ),
        ({"task": "file", "question_column": ""}, "task.question_column is ''; it must be a column's name"),
        (
            {"task": "file", "question_column": "a", "answer_column": "a"},
            "task.answer_column is 'a'; it must be another one",
        ),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(**settings)


# Limits


def hanging_score(response, ground_truth):
    if response == "hang":
        time.sleep(60)
    return Score(1.0, 1.0, 1.0, response, "said")


def never_settled(response, ground_truth):
    return None


def test_a_grader_that_hangs_costs_its_answer_and_not_the_run(monkeypatch):
    monkeypatch.setitem(REWARDS, "slow", Reward(hanging_score, never_settled, ()))
    with grading_pool(load(task="gsm8k"), ["slow"]) as pool:
        assert [score.rule for score in pool.score([(each, "1") for each in ("a", "hang", "b")])] == [
            "said",
            "timeout",
            "said",
        ]


def test_the_rewards_within_limits_are_the_rewards():
    task = load(task="math")
    pairs = [
        (r"</think> <answer>\sqrt{16}^2 - 4</answer>", "12"),
        (r"</think> <answer>\frac{\sqrt{6}-\sqrt{2}}{4}</answer>", r"\frac{\sqrt{6}-\sqrt{2}}{4}"),
        ("</think> <answer>5</answer>", "6"),
        ("5", "5"),
    ]
    with grading_pool(task) as pool:
        got = [(score.reward, score.rule, score.extracted) for score in pool.score(pairs)]
    assert got == [(score.reward, score.rule, score.extracted) for score in task.rewards(pairs)]
    assert [reward for reward, _, _ in got][1:] == [1.0, 0.0, 0.0]


def test_the_rewards_of_countdown_have_limits_too():
    truth = {"numbers": [9, 5, 18], "target": 4}
    with grading_pool(CountdownTask(train_problems=1)) as pool:
        pairs = [("<answer>18-9-5</answer>", truth), ("<answer>18-9</answer>", truth), ("18", truth), ("", {})]
        scores = pool.score(pairs)
        assert pool._workers
    assert [score.reward for score in scores] == [1.0, 0.1, 0.0, 0.0]
    assert [score.failed for score in scores] == [False, False, False, True]
    assert scores[3].rule.startswith("reward failed: DataError: ground truth is {};")
