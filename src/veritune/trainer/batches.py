"""A batch begins with prompts that are drawn by the step, and with responses that are sampled and graded."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from veritune.core.config import CommonConfig
from veritune.core.errors import DataError, EngineError, RewardError
from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, Example, Group, Pairs, Sampling, Score, Task
from veritune.engines.weight_check import load_proven_weights
from veritune.grading import OneByOne
from veritune.model.policy import encode_prompts
from veritune.trainer.evaluate import evaluate
from veritune.trainer.session import Session


def examples_of(task: Task, split: str) -> Sequence[Example]:
    """The task's examples of a split; a DataError where there are none."""
    examples = task.examples(split)
    if not examples:
        raise DataError(f"task {task.name} has no {split} examples")
    return examples


def draw_batch(examples: Sequence[Example], size: int, step: int, seed: int) -> list[Example]:
    """The examples of step 1, 2, …: consecutive slices of one reshuffled pass over the examples after another."""
    chosen: list[Example] = []
    position = (step - 1) * size
    while len(chosen) < size:
        epoch, offset = divmod(position + len(chosen), len(examples))
        order = list(range(len(examples)))
        random.Random(derive_seed(seed, epoch, "data order")).shuffle(order)
        chosen += [examples[index] for index in order[offset : offset + size - len(chosen)]]
    return chosen


def sampling_of(config: CommonConfig, step: int, purpose: str, *, stop: tuple[str, ...], n: int) -> Sampling:
    """How a recipe samples at `step`; the purpose keeps rollouts and validations apart."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        min_tokens=config.min_tokens,
        stop=stop,
        n=n,
        seed=derive_seed(config.seed, step, purpose),
    )


def require_version(completions: Sequence[Sequence[Completion]], version: int) -> None:
    """Refuse completions of weights that were not asked for."""
    found = {completion.weights_version for group in completions for completion in group}
    if found - {version}:
        raise EngineError(f"asked for completions of weights version {version}, got {sorted(found)}")


def serve_policy(session: Session[CommonConfig], *, version: int) -> None:
    """Have the engine serve the policy's present weights as `version`, and prove that it does (EngineError)."""
    load_proven_weights(session.engine, session.policy.model, version, session.config.engine_settings.number_type)


def sample_and_grade(
    session: Session[CommonConfig], step: int, purpose: str, examples: Sequence[Example], *, n: int, version: int
) -> list[Group]:
    """n graded responses for each example, from the weights that the engine was given last, proved to be `version`."""
    prompts_ids = encode_prompts(session.policy, map(session.task.prompt, examples))
    sampling = sampling_of(session.config, step, purpose, stop=session.task.stop, n=n)
    groups = evaluate(session.engine, partial(safe_rewards, session, f"step {step}"), examples, prompts_ids, sampling)
    require_version([group.completions for group in groups], version)
    return groups


def safe_rewards(session: Session[CommonConfig], where: str, pairs: Pairs) -> list[Score]:
    """The Scores of pairs: 0 where the reward failed, with a warning on stderr; RewardError where all of them did."""
    scores = (session.rewards or OneByOne(session.task.rewards).here)(pairs)
    reasons = Counter(score.rule for score in scores if score.failed)
    if reasons:
        reason, failures = reasons.most_common(1)[0][0], reasons.total()
        if failures == len(scores):
            raise RewardError(f"{where}: all {failures} rewards failed; most often by: {reason}")
        line = f"warning: {where}: {failures} of {len(scores)} rewards failed and count as 0; most often by: {reason}"
        print(line, file=sys.stderr, flush=True)
    return scores
