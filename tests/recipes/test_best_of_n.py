"""pass@N, Best@N and majority vote, counted again from the responses that the run folder holds."""

import dataclasses
import itertools
from collections import Counter
from statistics import fmean

import pytest
from vowels import VowelTask, follow, fresh

from veritune.cli import main
from veritune.core.errors import ConfigError, DataError
from veritune.core.run_folder import RunFolder
from veritune.core.statistics import wilson_interval
from veritune.core.types import Example, Score
from veritune.model.policy import save_policy
from veritune.recipes import best_of_n
from veritune.recipes import eval as eval_recipe
from veritune.recipes.config import BestOfNConfig, EvalConfig

SMALL = BestOfNConfig(samples=(1, 2, 4), max_tokens=10, validation_examples=12)


class VowelCountTask(VowelTask):
    """The answer is the number of vowels, and an even one is right, so that votes can agree."""

    def reward(self, response_text, ground_truth):
        count = sum(response_text.count(vowel) for vowel in ground_truth)
        right = float(count % 2 == 0)
        return Score(reward=right, format_reward=1.0, answer_reward=right, extracted=str(count))


def pool(random_policy, folder, config=SMALL):
    run = RunFolder.create(folder, "", {})
    follow(best_of_n, config, fresh(random_policy), run, task=VowelCountTask())
    (row,) = run.metrics()
    rows = run.read_rows("validation", 0)
    return row, [list(group) for _, group in itertools.groupby(rows, key=lambda each: each["id"])]


def right(row):
    return row["score"]["answer_reward"] >= 1


def test_the_numbers_are_those_of_the_responses(random_policy, tmp_path):
    row, groups = pool(random_policy, tmp_path / "run")
    assert [len(group) for group in groups] == [4] * 12
    for n in (1, 2, 4):
        firsts = [group[:n] for group in groups]
        assert row[f"pass_at_{n}"] == fmean(any(map(right, each)) for each in firsts)
        likeliest = [max(each, key=lambda one: sum(one["logprobs"]) / len(one["logprobs"])) for each in firsts]
        assert row[f"best_at_{n}"] == fmean(map(right, likeliest))
        votes = [Counter(one["score"]["extracted"] for one in each).most_common(1)[0][0] for each in firsts]
        assert row[f"majority_at_{n}"] == fmean(int(vote) % 2 == 0 for vote in votes)
        subsets = [itertools.combinations(map(right, group), n) for group in groups]
        assert row[f"pass_unbiased_at_{n}"] == pytest.approx(fmean(fmean(map(any, each)) for each in subsets))
    assert row["best_at_1"] == row["pass_at_1"] == row["majority_at_1"]
    assert row["pass_at_1"] <= row["pass_at_2"] <= row["pass_at_4"]
    assert row["pass_unbiased_at_4"] == row["pass_at_4"]


def test_the_interval_is_over_prompts(random_policy, tmp_path, monkeypatch):
    # Each prompt's siblings agree: 48 responses are worth no more than 12.
    monkeypatch.setattr(VowelCountTask, "reward", lambda self, text, truth: Score(truth, 1.0, truth))
    problems = [Example(f"{index}", f"{index}: ", float(index < 6)) for index in range(12)]
    monkeypatch.setattr(VowelCountTask, "examples", lambda self, split: problems)
    row, _ = pool(random_policy, tmp_path / "run")
    assert row["validation_accuracy"] == 0.5
    low, high = wilson_interval(6, 12)
    assert row["validation_accuracy_low"] == pytest.approx(low, abs=0.01)
    assert row["validation_accuracy_high"] == pytest.approx(high, abs=0.01)


def test_an_eval_runs_responses_are_the_first_samples(random_policy, tmp_path, monkeypatch):
    measured = RunFolder.create(tmp_path / "measured", "", {})
    config = EvalConfig(max_tokens=10, validation_examples=12)
    follow(eval_recipe, config, fresh(random_policy), measured, task=VowelCountTask())
    asked = []
    real = best_of_n.sample_and_grade

    def counted(*arguments, n, **others):
        asked.append(n)
        return real(*arguments, n=n, **others)

    monkeypatch.setattr(best_of_n, "sample_and_grade", counted)
    row, groups = pool(random_policy, tmp_path / "run", dataclasses.replace(SMALL, reuse=measured.path))
    assert asked == [3]
    firsts = measured.read_rows("validation", 0)
    for kept in ("id", "response_ids", "logprobs", "score", "finish_reason"):
        assert [group[0][kept] for group in groups] == [each[kept] for each in firsts]
    assert all(group[0]["response_ids"] != group[1]["response_ids"] for group in groups)
    assert row["pass_at_1"] == measured.metrics()[0]["validation_accuracy"]
    # One sample in all needs no engine.
    asked.clear()
    alone = dataclasses.replace(SMALL, samples=(1,), reuse=measured.path)
    row, _ = pool(random_policy, tmp_path / "alone", alone)
    assert asked == [] and row["best_at_1"] == measured.metrics()[0]["validation_accuracy"]


def test_a_run_on_other_problems_is_not_reused(random_policy, tmp_path, monkeypatch):
    measured = RunFolder.create(tmp_path / "measured", "", {})
    config = EvalConfig(max_tokens=10, validation_examples=11)
    follow(eval_recipe, config, fresh(random_policy), measured, task=VowelCountTask())
    reusing = dataclasses.replace(SMALL, reuse=measured.path)
    with pytest.raises(DataError, match="no response for example validation-11"):
        pool(random_policy, tmp_path / "a", reusing)
    others = [Example(f"validation-{index}", "other: ", "aeiou") for index in range(11)]
    monkeypatch.setattr(VowelCountTask, "examples", lambda self, split: others)
    with pytest.raises(ConfigError, match="its questions are not those of this task"):
        pool(random_policy, tmp_path / "b", reusing)


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="temperature is 0"):
        BestOfNConfig(temperature=0)
    with pytest.raises(ConfigError, match=r"samples is \(0, 4\)"):
        BestOfNConfig(samples=(0, 4))


def test_the_command_prints_a_line_for_each_n(random_policy, tmp_path, capsys):
    save_policy(random_policy, tmp_path / "policy")
    arguments = ["--policy", tmp_path / "policy", "--max-tokens", 4, "--validation-examples", 3, "--threads", 1]
    with pytest.raises(SystemExit) as ended:
        main(["best-of-n", *map(str, arguments), "--samples", "1,2", "--run", str(tmp_path / "run")])
    assert not ended.value.code
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Four tokens hold no answer: 0 of 3, whose Wilson interval ends at z² / (3 + z²) = 56.1%.
    for n in ("1", "2"):
        assert [n, *["0.0%", "[0.0,", "56.1]"] * 4] in lines
