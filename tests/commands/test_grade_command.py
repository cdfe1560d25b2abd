"""`veritune grade` as a person uses it: the table, the scored rows, the explanations, and what is refused."""

from __future__ import annotations

import json
import re
import time

import pytest

from veritune.cli import main
from veritune.commands.grade import GradeConfig
from veritune.core.errors import ConfigError
from veritune.core.types import Score
from veritune.tasks.rewards import REWARDS, Reward

GOLD = "She has 40+2=<<40+2=42>>42.\n#### 42"
ANSWERS = [
    ("so </think> <answer> 42 </answer>", "correct"),
    ("so </think>\n<answer>$42.00</answer>", "correct"),
    ("so </think> <answer> 43 </answer>", "format only"),
    ("so </think> <answer> 42 or 43 </answer>", "format only"),
    ("so </think> <answer> [bold]x[/bold] </answer>", "format only"),
    ("it is 42", "neither"),
    ("<answer>42</answer>", "neither"),
    ("", "neither"),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def answers(tmp_path):
    return write(
        tmp_path / "answers.jsonl",
        [{"id": n, "response": response, "ground_truth": GOLD} for n, (response, _) in enumerate(ANSWERS)],
    )


def run(*arguments):
    """The exit code of `veritune grade` with these arguments."""
    with pytest.raises(SystemExit) as ended:
        main(["grade", *map(str, arguments)])
    return ended.value.code or 0


def counts(output):
    """The table as {verdict: (answers, share)}."""
    found = re.findall(r"^(correct|format only|neither|failed) +([\d,]+) +([\d.]+%)", output, re.MULTILINE)
    return {verdict: (int(number.replace(",", "")), share) for verdict, number, share in found}


@pytest.mark.parametrize("columns", ["40", "100", "200"])
def test_the_table_counts_every_answer_once(answers, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert run("--task", "gsm8k", "--file", answers) == 0
    output = capsys.readouterr().out
    assert counts(output) == {
        "correct": (2, "25.0%"),
        "format only": (3, "37.5%"),
        "neither": (3, "37.5%"),
        "failed": (0, "0.0%"),
    }
    assert "7.1–59.1%" in output  # Wilson's interval of 2 of 8, by hand
    assert "answers graded per second" in " ".join(output.split())
    assert str(answers.with_name("scored-answers.jsonl")) in output
    assert all(len(line) <= int(columns) or str(answers.parent) in line for line in output.splitlines())


def test_the_scored_rows_are_the_rows_with_their_scores(answers, tmp_path):
    assert run("--task", "gsm8k", "--file", answers, "--output", tmp_path / "out.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["response"], row["ground_truth"]) for row in rows] == [
        (n, response, GOLD) for n, (response, _) in enumerate(ANSWERS)
    ]
    for row, (_, verdict) in zip(rows, ANSWERS, strict=True):
        score = row["score"]
        assert set(score) == {"reward", "format_reward", "answer_reward", "extracted", "rule", "seconds", "parts"}
        assert (score["answer_reward"], score["format_reward"]) == {
            "correct": (1.0, 1.0),
            "format only": (0.0, 1.0),
            "neither": (0.0, 0.0),
        }[verdict]
    assert rows[3]["score"]["extracted"] == "42 or 43" and rows[5]["score"]["extracted"] is None
    assert not list(tmp_path.glob("*.partial"))


def test_an_explanation_shows_rule_reading_and_gold_for_each_rule_first(answers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("--task", "gsm8k", "--file", answers, "--explain", "4") == 0
    output = capsys.readouterr().out
    explained = re.findall(r"^line (\d+): (correct|format only|neither), rule: (.+)$", output, re.MULTILINE)
    lines = [int(line) for line, _, _ in explained]
    assert len(explained) == 4 and lines == sorted(lines)
    assert len({(verdict, rule) for _, verdict, rule in explained}) == 4
    assert all(verdict == ANSWERS[int(line) - 1][1] for line, verdict, _ in explained)
    assert re.search(
        r"^read +42\s*\nexpected +42\s*\nresponse +so </think> <answer> 42 </answer>", output, re.MULTILINE
    )
    assert run("--task", "gsm8k", "--file", answers, "--explain", "100") == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"^line \d+: ", output, re.MULTILINE)) == len(ANSWERS)
    assert re.search(r"^read +\[bold\]x\[/bold\]", output, re.MULTILINE)
    assert re.search(r"^line 6: neither, rule: format\nread +nothing to judge", output, re.MULTILINE)


def test_a_long_or_hostile_response_is_shown_by_its_end_without_control_characters(tmp_path, capsys):
    response = "\x1b[2J" + "x" * 100_000 + " </think> <answer>\x1b]0;owned\x07 7 </answer>"
    path = write(tmp_path / "a.jsonl", [{"response": response, "ground_truth": 7}])
    assert run("--file", path, "--explain", "1") == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\x07" not in output and "7 </answer>" in output and len(output) < 3000


@pytest.mark.parametrize(
    "responses, settings, told, correct",
    [
        ([r"\boxed{42}", r"so \boxed{42}", "</think> <answer>42</answer>"], [], "question_only (chosen by", 2),
        ([r"</think> <answer>\boxed{42}</answer>", r"\boxed{42}"], [], "r1_zero (chosen by", 1),
        ([r"</think> <answer>\boxed{42}</answer>"], ["--reward", "question_only"], "question_only;", 1),
        (["</think>\n<answer>42</answer>"], ["--reward", "r1_zero"], "r1_zero;", 1),
        (["</think>\n<answer>42</answer>"], ["--reward", "r1_zero_strict"], "r1_zero_strict;", 0),
    ],
)
def test_the_format_is_the_one_that_is_said_or_that_most_responses_wear(
    tmp_path, capsys, responses, settings, told, correct
):
    path = write(tmp_path / "a.jsonl", [{"response": each, "ground_truth": "42"} for each in responses])
    assert run("--file", path, *settings) == 0
    output = capsys.readouterr().out
    assert f"reward: {told}" in output and counts(output)["correct"][0] == correct


def hang_on_request(response, ground_truth):
    if "hang" in response:
        time.sleep(60)
    return Score(1.0, 1.0, 1.0, response, "said")


def never_settled(response, ground_truth):
    return None


def test_an_answer_past_its_limit_is_a_timeout_and_the_rest_are_graded(tmp_path, capsys, monkeypatch):
    slow = Reward(hang_on_request, never_settled, ())
    monkeypatch.setitem(REWARDS, "r1_zero", slow)
    rows = [{"response": "hang" if n == 3 else f"{n}", "ground_truth": 1} for n in range(6)]
    assert run("--file", write(tmp_path / "a.jsonl", rows), "--seconds-per-answer", "0.5", "--explain", "9") == 0
    output = capsys.readouterr().out
    assert counts(output) == {
        "correct": (5, "83.3%"),
        "format only": (0, "0.0%"),
        "neither": (0, "0.0%"),
        "failed": (1, "16.7%"),
    }
    assert "line 4: failed, rule: timeout\n" in output
    scored = [json.loads(line) for line in (tmp_path / "scored-a.jsonl").read_text().splitlines()]
    assert [row["score"]["extracted"] for row in scored] == ["0", "1", "2", None, "4", "5"]


def test_countdown_answers_and_parquet_files(tmp_path, capsys):
    rows = [
        {"response": f"<answer>{equation}</answer>", "ground_truth": {"numbers": [3, 7, 2], "target": 20}}
        for equation in ("(3+7)*2", "7+3*2", "3+7")
    ]
    assert run("--task", "countdown", "--file", write(tmp_path / "a.jsonl", rows)) == 0
    assert counts(capsys.readouterr().out)["correct"] == (1, "33.3%")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert run("--task", "countdown", "--file", tmp_path / "b.parquet") == 0
    assert counts(capsys.readouterr().out)["format only"] == (2, "66.7%")
    assert len((tmp_path / "scored-b.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "task, row, message",
    [
        ("math", {"ground_truth": "1"}, "'response' is missing; the row has 'ground_truth'"),
        ("math", {"response": "1"}, "'ground_truth' is missing"),
        ("math", {"response": None, "ground_truth": "1"}, "'response' is None; it must be text"),
        ("math", {"response": "1", "ground_truth": {"a": 1}}, "'ground_truth' is {'a': 1}; it must be text"),
        ("math", {"response": "1", "ground_truth": ""}, "'ground_truth' is ''"),
        ("countdown", {"response": "1", "ground_truth": "1"}, "'ground_truth': ground truth is '1'; it must be"),
        ("math", [], "the row is []"),
    ],
)
def test_a_bad_row_is_one_line_that_names_it_or_is_counted(tmp_path, capsys, task, row, message):
    good = {"response": "<answer>1</answer>", "ground_truth": {"numbers": [1], "target": 1}}
    if task == "math":
        good["ground_truth"] = "1"
    path = write(tmp_path / "a.jsonl", [good, row])
    assert run("--task", task, "--file", path) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {path} line 2: {message}") and captured.err.count("\n") == 1
    assert not (tmp_path / "scored-a.jsonl").exists()
    assert run("--task", task, "--file", path, "--skip-bad-rows") == 0
    assert "left out: 1 of 2 rows; the first:" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path, answers, capsys):
    assert run("--file", tmp_path / "none.jsonl") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.jsonl'}: there is no such file\n"
    (tmp_path / "folder").mkdir()
    for output in (tmp_path / "folder", tmp_path / "missing" / "out.jsonl"):
        assert run("--task", "gsm8k", "--file", answers, "--output", output) == 1
        assert capsys.readouterr().err.startswith(f"error: cannot write {output}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "folder"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"explain": -1}, "explain is -1"),
        ({"workers": 0}, "workers is 0"),
        ({"seconds_per_answer": 0.0}, "seconds_per_answer is 0.0"),
        ({"output": "a.jsonl"}, "output is 'a.jsonl'; it must be another file"),
        ({"task": "chess"}, "task is 'chess'; allowed are countdown, gsm8k, math, file, or package.module:name"),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        GradeConfig(file="a.jsonl", **settings)
