"""Measuring a policy: what the row of metrics says, counted again from the responses that the run folder holds."""

import json
import math
from statistics import fmean

import pytest
from vowels import VowelTask, follow, fresh

from veritune.cli import main
from veritune.core.run_folder import RunFolder
from veritune.core.types import Score
from veritune.model.policy import save_policy
from veritune.recipes import eval as eval_recipe
from veritune.recipes.config import EvalConfig
from veritune.recipes.eval import category_of

SMALL = EvalConfig(max_tokens=12, validation_examples=10)


class PickyTask(VowelTask):
    """Well-formed if there is an "e" in the response; right if there is an "a" besides."""

    def reward(self, response_text, ground_truth):
        form = float("e" in response_text)
        answer = float(form and "a" in response_text)
        return Score(reward=0.1 * form + 0.9 * answer, format_reward=form, answer_reward=answer)


def test_categories():
    for form, answer, name in ((1, 1, "correct"), (1, 0, "format1"), (0, 0, "format0")):
        assert category_of({"format_reward": form, "answer_reward": answer}) == name


@pytest.mark.parametrize("split", ["validation", "train"])
def test_the_numbers_are_those_of_the_responses(random_policy, tmp_path, split):
    config = EvalConfig(max_tokens=12, validation_examples=10, split=split)
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(eval_recipe, config, fresh(random_policy), run, task=PickyTask())
    rows, (row,) = run.read_rows("validation", 0), run.metrics()
    texts = [each["response"] for each in rows]
    assert [each["id"] for each in rows] == [f"{split}-{index}" for index in range(10)]
    forms, answers = ["e" in text for text in texts], ["e" in text and "a" in text for text in texts]
    lengths = [len(each["response_ids"]) for each in rows]
    assert row["count_correct"] == sum(answers)
    assert row["count_format1"] == sum(forms) - sum(answers)
    assert row["count_format0"] == 10 - sum(forms)
    assert row["validation_accuracy"] == sum(answers) / 10
    assert row["validation_format_reward"] == pytest.approx(sum(forms) / 10)
    assert row["validation_reward"] == pytest.approx((0.1 * sum(forms) + 0.9 * sum(answers)) / 10)
    # Wilson: the p with |p - rate| = z sqrt(p (1 - p) / n).
    for end in (row["validation_accuracy_low"], row["validation_accuracy_high"]):
        assert abs(end - sum(answers) / 10) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 10), abs=1e-9)
    assert row["validation_length"] == pytest.approx(fmean(lengths))
    for name, wanted in (("length_correct", True), ("length_incorrect", False)):
        of_those = [length for length, right in zip(lengths, answers, strict=True) if right is wanted]
        assert row[f"validation_{name}"] == (pytest.approx(fmean(of_those)) if of_those else None)
    assert row["validation_truncated"] == sum(each["finish_reason"] == "length" for each in rows) / 10
    assert row["rollouts_per_second"] == pytest.approx(10 / row["seconds_elapsed"])
    entropies = [-sum(each["logprobs"]) / len(each["logprobs"]) for each in rows]
    assert [each["entropy"] for each in rows] == pytest.approx(entropies, abs=1e-5)


def test_the_seed_decides_the_responses(random_policy, tmp_path):
    def responses(name, seed):
        run = RunFolder.create(tmp_path / name, "", {})
        follow(eval_recipe, EvalConfig(max_tokens=12, validation_examples=4, seed=seed), fresh(random_policy), run)
        return [row["response_ids"] for row in run.read_rows("validation", 0)]

    first = responses("a", 0)
    assert responses("b", 0) == first
    assert responses("c", 1) != first


def test_the_command_prints_the_counts_and_examples_of_a_category(random_policy, tmp_path, capsys):
    save_policy(random_policy, tmp_path / "policy")
    arguments = ["--policy", tmp_path / "policy", "--max-tokens", 6, "--validation-examples", 5, "--threads", 1]
    more = ["--show", 3, "--category", "format0", "--run", tmp_path / "run"]
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in ["eval", *arguments, *more]])
    assert not ended.value.code
    told = capsys.readouterr().out
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["count_format0"] == 5  # six tokens hold no answer
    assert "format 0, answer 0" in told and "accuracy 0.0% (95% 0.0% to 43.4%)" in told
    assert told.count("format0, rule no_answer_tag") == 3
