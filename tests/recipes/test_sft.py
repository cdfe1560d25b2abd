"""Supervised fine-tuning: which traces are taken, and its steps against a plain loop."""

import copy
import dataclasses
import json

import pytest
from vowels import VowelTask, assert_resumed_is_uninterrupted, assert_same_weights, follow, fresh, weights
from vowels import supervised_steps_by_hand as by_hand

from veritune.core.errors import ConfigError, DataError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Example
from veritune.recipes import sft
from veritune.recipes.config import SFTConfig
from veritune.trainer.session import Session

ROWS = [
    {"prompt": "one: ", "response": "aaa", "ground_truth": "aeiou"},  # right
    {"prompt": "one: ", "response": "aaa", "ground_truth": "aeiou"},  # the same
    {"prompt": "two: ", "response": "bcd", "ground_truth": "aeiou"},  # wrong
    {"prompt": "two: ", "response": "eee ooo", "ground_truth": "aeiou"},  # right
    {"prompt": "three: ", "response": "18-5=13", "ground_truth": "aeiou"},  # wrong
    {"prompt": "three: ", "response": "aei", "ground_truth": "aeiou"},  # right
    {"prompt": "four: ", "response": "aaa", "ground_truth": "aeiou"},  # right: another prompt
]
SMALL = SFTConfig(
    batch_size=8,
    learning_rate=1e-3,
    max_tokens=8,
    validation_examples=4,
    validate_every=2,
    checkpoint_every=2,
)


@pytest.fixture
def traces(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


def load(policy, config, task=None):
    return sft.load_pairs(Session(config, policy, task or VowelTask(), None, None))


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (7, 7, 6)),
        ({"filter_correct": True}, (7, 5, 4)),
        ({"filter_correct": True, "unique_examples": 3}, (7, 5, 3)),
        ({"unique_examples": 100}, (7, 7, 6)),
    ],
)
def test_traces_are_read_kept_and_unique(random_policy, traces, changes, counts):
    pairs, told = load(random_policy, dataclasses.replace(SMALL, traces=traces, **changes))
    assert tuple(told.values()) == counts and len(pairs) == counts[2]
    texts = [(random_policy.tokenizer.decode(p), random_policy.tokenizer.decode(r[:-1])) for p, r in pairs]
    assert len(set(texts)) == len(texts) and all(r[-1] == random_policy.tokenizer.eos_token_id for _, r in pairs)
    right = {("one: ", "aaa"), ("two: ", "eee ooo"), ("three: ", "aei"), ("four: ", "aaa")}
    assert set(texts) <= (right if "filter_correct" in changes else right | {("two: ", "bcd"), ("three: ", "18-5=13")})


def test_smaller_draws_are_the_beginning_of_larger_ones(random_policy, traces):
    def draw(count, seed=0):
        return load(random_policy, dataclasses.replace(SMALL, traces=traces, unique_examples=count, seed=seed))[0]

    assert draw(2) == draw(6)[:2]
    assert any(draw(6, seed) != draw(6) for seed in (1, 2, 3))


def test_a_tasks_own_traces_are_its_prompts_with_its_responses(random_policy):
    class Traced(VowelTask):
        def traces(self, seed):
            return [(Example("a", f"q{seed}: ", "aeiou"), "aaa"), (Example("b", "r: ", "aeiou"), "bbb")]

    config = dataclasses.replace(SMALL, seed=3)
    assert load(random_policy, config, Traced())[1] == {"traces_read": 2, "traces_kept": 2, "traces_unique": 2}
    ((prompt, _),) = load(random_policy, dataclasses.replace(config, filter_correct=True), Traced())[0]
    assert random_policy.tokenizer.decode(prompt) == "q3: "
    with pytest.raises(DataError, match="task vowels writes no traces of its own"):
        load(random_policy, SMALL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": 1, "response": "b"}\n', "line 2: 'prompt' must be a string"),
        ('{"prompt": "a"}\n', "line 1: 'response' must be a string"),
        ("\n{oops\n", "line 2: not valid JSON"),
        ('{"prompt": "", "response": "b"}\n', "line 1: 'prompt' is empty"),
        ('{"prompt": "a", "response": "b"}\n', "no 'ground_truth' to grade"),
        ('{"prompt": "a", "response": "b", "ground_truth": "aeiou"}\n', "no traces are left .* 1 were read, 0 kept"),
    ],
)
def test_bad_traces_are_named(random_policy, tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        load(random_policy, dataclasses.replace(SMALL, traces=path, filter_correct=True))
    with pytest.raises(ConfigError, match="unique_examples is 0"):
        SFTConfig(unique_examples=0)


def test_a_trace_beyond_the_context_is_refused(random_policy, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "7" * 1000, "response": "8" * 23}) + "\n")
    config = dataclasses.replace(SMALL, traces=path)
    ((prompt, response),) = load(random_policy, config)[0]
    assert len(prompt) + len(response) == 1024 == random_policy.context_length  # the end of the response is one more
    path.write_text(json.dumps({"prompt": "7" * 1000, "response": "8" * 24}) + "\n")
    with pytest.raises(DataError, match=r"a trace has 1025 tokens, .* context holds 1024"):
        load(random_policy, config)


def test_a_chat_policy_is_trained_on_what_it_is_asked(random_policy, traces):
    tokenizer = copy.deepcopy(random_policy.tokenizer)
    tokenizer.chat_template = "{{ 'ask ' + messages[0].content + ' now ' }}"
    chat = dataclasses.replace(random_policy, tokenizer=tokenizer, chat=True)
    config = dataclasses.replace(SMALL, traces=traces)
    plain, asked = (
        {random_policy.tokenizer.decode(prompt) for prompt, _ in load(policy, config)[0]}
        for policy in (random_policy, chat)
    )
    assert asked == {f"ask {prompt} now " for prompt in plain}


def test_a_warm_up_longer_than_the_run_is_refused(random_policy, traces, tmp_path):
    with pytest.raises(ConfigError, match="warmup_steps is 1000; it must be at most"):
        follow(sft, dataclasses.replace(SMALL, traces=traces, warmup_steps=1000), random_policy, tmp_path)


@pytest.mark.parametrize("microbatch_tokens", [16, 4096])
def test_two_steps_are_those_of_a_plain_loop(random_policy, traces, tmp_path, microbatch_tokens):
    config = dataclasses.replace(SMALL, traces=traces, epochs=2, microbatch_tokens=microbatch_tokens)
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(sft, config, fresh(random_policy), run)
    pairs, _ = load(random_policy, config)
    model, losses = by_hand(random_policy, [pairs, pairs], config.learning_rate)  # one batch holds all six
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2] and [row["epoch"] for row in rows[1:]] == [1, 2]
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses, rel=1e-3)
    assert_same_weights(weights(run.path, 2), model, random_policy.model)
    tokens = sum(len(prompt) + len(response) for prompt, response in pairs)
    for row in rows[1:]:
        assert row["train_tokens"] == tokens
        assert row["train_tokens_per_second"] == pytest.approx(tokens / row["seconds_train"])


def test_every_epoch_has_every_trace_once_in_another_order(random_policy, traces, tmp_path, monkeypatch):
    batches = []

    def take(session, step, optimizer, pairs, learning_rate):
        batches.append(pairs)
        return {}

    def take_all(session, optimizer, *, steps, update):
        for step in range(1, steps + 1):
            update(step)

    monkeypatch.setattr(sft, "supervised_update", take)
    monkeypatch.setattr(sft, "train", take_all)
    config = dataclasses.replace(SMALL, traces=traces, epochs=3, batch_size=4)
    sft.run(Session(config, fresh(random_policy), VowelTask(), None, None))
    assert [len(batch) for batch in batches] == [4, 2] * 3
    epochs = [batches[index] + batches[index + 1] for index in (0, 2, 4)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({str(epoch) for epoch in epochs}) > 1


def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(random_policy, traces, tmp_path):
    config = dataclasses.replace(SMALL, traces=traces, epochs=2, batch_size=3, schedule="cosine", warmup_steps=1)
    whole = assert_resumed_is_uninterrupted(sft, config, random_policy, tmp_path, kill_at=3, resume_from=2, steps=4)
    assert whole.steps("validation") == [0, 2, 4]
    # Warm-up to 1e-3 at step 1, then half a cosine over the three steps after it.
    rates = [row["learning_rate"] for row in whole.metrics()[1:]]
    assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.25e-3])
