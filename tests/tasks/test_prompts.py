from __future__ import annotations

import pytest

from veritune.core.errors import ConfigError
from veritune.tasks.prompts import fill_prompt, load_prompt, shipped_prompts


def test_the_shipped_prompts_are_complete_and_end_where_the_policy_begins():
    assert shipped_prompts() == ["compact", "countdown_instruct", "question_only", "r1_zero"]
    assert load_prompt("question_only") == "{question}"
    assert load_prompt("compact") == "{question}\n<think>\n"
    r1_zero = load_prompt("r1_zero")
    assert r1_zero.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant")
    assert "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: " in r1_zero
    assert r1_zero.endswith("User: {question}\nAssistant: <think>")
    assert all(load_prompt(name).count("{question}") == 1 for name in shipped_prompts())


@pytest.mark.parametrize("question", ["{question}", "{0} {", "\\frac{1}{2}", "%s", ""])
def test_braces_in_the_question_and_the_template_stay_as_they_are(question):
    assert fill_prompt("{x} {question} {}", question) == "{x} " + question + " {}"


def test_a_file_is_taken_byte_for_byte(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("é\r\n{question}\r\n".encode())
    assert load_prompt(str(path)) == "é\r\n{question}\r\n"


def test_what_is_no_template_is_refused(tmp_path):
    without, binary = tmp_path / "without.txt", tmp_path / "binary.txt"
    without.write_text("no place for it")
    binary.write_bytes(b"\xff{question}")
    with pytest.raises(ConfigError, match=r"has no \{question\}"):
        load_prompt(str(without))
    with pytest.raises(ConfigError, match="UTF-8"):
        load_prompt(str(binary))
    with pytest.raises(ConfigError, match=r"must be one of compact, .*, or the path of a file"):
        load_prompt("../r1_zero")
