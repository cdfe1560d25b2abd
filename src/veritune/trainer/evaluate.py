"""Measuring a policy on a task: generate, grade, count."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from veritune.core.errors import EngineError
from veritune.core.statistics import accuracy_interval, share_interval, unbiased_pass_at_n, wilson_interval
from veritune.core.types import Completion, Engine, Example, Group, RewardFunction, Sampling, Score


def evaluate(
    engine: Engine,
    rewards: RewardFunction,
    examples: Sequence[Example],
    prompts_ids: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[Group]:
    """Generate `sampling.n` responses for each of N prompts and grade them: N groups in the examples' order."""
    completions = engine.generate(prompts_ids, sampling)
    asked = list(zip(examples, completions, strict=True))
    scores = iter(rewards([(each.text, example.ground_truth) for example, group in asked for each in group]))
    return [Group(example, each, list(itertools.islice(scores, len(each)))) for example, each in asked]


def group_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One JSON-ready row a response, siblings side by side."""
    return [
        response_row(group.example, completion, score)
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]


def log_generations(groups: Sequence[Group], write: Callable[[list[dict[str, Any]]], None]) -> dict[str, float | None]:
    """Keep every response (prompt, text, ground truth, reward parts, mean token entropy) and return their summary."""
    write(group_rows(groups))
    return summarize(groups)


def summarize(groups: Sequence[Group]) -> dict[str, float | None]:
    """Means over responses: rewards, accuracy with its interval, lengths in tokens, truncation, entropy in nats.

    A mean over no responses, such as the length of the correct ones where none is, is None. Where rewards failed,
    `reward_failures` says how many, and `grader_timeouts` how many of them by running out of time. Where the reward is
    a sum of several, `reward_NAME` is the mean of each.
    """
    scores = [score for group in groups for score in group.scores]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.ids) for completion in completions]
    correct = [length for length, score in zip(lengths, scores, strict=True) if score.answer_reward >= 1]
    incorrect = [length for length, score in zip(lengths, scores, strict=True) if score.answer_reward < 1]
    low, high = accuracy_interval([[score.answer_reward >= 1 for score in group.scores] for group in groups])
    failures = {
        "reward_failures": sum(score.failed for score in scores),
        "grader_timeouts": sum(score.rule == "timeout" for score in scores),
    }
    return {
        "reward": fmean(score.reward for score in scores),
        "format_reward": fmean(score.format_reward for score in scores),
        "accuracy": len(correct) / len(scores),
        "accuracy_low": low,
        "accuracy_high": high,
        "length": fmean(lengths),
        "length_correct": fmean(correct) if correct else None,
        "length_incorrect": fmean(incorrect) if incorrect else None,
        "truncated": fmean(completion.finish_reason == "length" for completion in completions),
        "entropy": sampled_entropy(completions),
        **{name: count for name, count in failures.items() if count},
        **mean_parts(scores),
    }


def mean_parts(scores: Sequence[Score]) -> dict[str, float]:
    """The mean of each reward of a weighted sum, over the responses for which none failed, as reward_NAME."""
    names = dict.fromkeys(name for score in scores for name in score.parts)
    return {f"reward_{name}": fmean(score.parts[name] for score in scores if name in score.parts) for name in names}


def sampled_entropy(completions: Sequence[Completion]) -> float:
    """Mean of -log p over sampled tokens: an unbiased estimate of the sampling distribution's entropy in nats.

    It costs nothing, where the exact entropy would cost a pass over the vocabulary at every position.
    """
    tokens = sum(len(completion.logprobs) for completion in completions)
    return -sum(sum(completion.logprobs) for completion in completions) / max(tokens, 1)


def response_row(example: Example, completion: Completion, score: Score) -> dict[str, Any]:
    """One response as the run folder keeps it: the problem, the ids and text, log-probabilities and the score."""
    return {
        "id": example.id,
        "question": example.question,
        "ground_truth": example.ground_truth,
        "response": completion.text,
        "finish_reason": completion.finish_reason,
        "weights_version": completion.weights_version,
        "entropy": sampled_entropy([completion]),
        "score": asdict(score),
        "prompt_ids": list(completion.prompt_ids),
        "response_ids": list(completion.ids),
        "logprobs": [round(value, 6) for value in completion.logprobs],
    }


# --- Several samples a prompt ------------------------------------------------------------------------------------


def best_of(completions: Sequence[Completion]) -> int:
    """The sample that the policy itself likes best: highest mean log-probability per token; the first of equals."""
    if not all(completion.logprobs for completion in completions):
        raise EngineError("Best@N compares log-probabilities, but the engine gave a completion without any")
    return max(range(len(completions)), key=lambda i: (fmean(completions[i].logprobs), -i))


def majority_of(scores: Sequence[Score]) -> int | None:
    """The first sample with the most frequent extracted answer, ties to the earlier; None if no sample has one."""
    counts = Counter(score.extracted for score in scores if score.extracted is not None)
    if not counts:
        return None
    winner = counts.most_common(1)[0][0]
    return next(index for index, score in enumerate(scores) if score.extracted == winner)


def several_samples(groups: Sequence[Group], n: int) -> dict[str, float]:
    """pass@n (unbiased, and plain over the first n), Best@n and majority@n over groups of at least n samples.

    Every 95% interval is over prompts: of shares for the unbiased estimator, of proportions for the others.
    """
    correct = [[score.answer_reward >= 1 for score in group.scores] for group in groups]
    unbiased = [unbiased_pass_at_n(len(row), sum(row), n) for row in correct]
    winners = [
        (row[best_of(group.completions[:n])], (majority := majority_of(group.scores[:n])) is not None and row[majority])
        for row, group in zip(correct, groups, strict=True)
    ]
    low, high = share_interval(unbiased, most_trials=sum(map(len, correct)))
    measured = {"pass_unbiased": fmean(unbiased), "pass_unbiased_low": low, "pass_unbiased_high": high}
    plain = {
        "pass": sum(any(row[:n]) for row in correct),
        "best": sum(best for best, _ in winners),
        "majority": sum(majority for _, majority in winners),
    }
    for name, successes in plain.items():
        low, high = wilson_interval(successes, len(groups))
        measured |= {name: successes / len(groups), f"{name}_low": low, f"{name}_high": high}
    return measured
