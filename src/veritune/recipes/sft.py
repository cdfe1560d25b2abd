"""Supervised fine-tuning on reasoning traces: next-token likelihood of the responses, prompts excluded."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError, DataError
from veritune.core.randomness import derive_seed
from veritune.core.types import Task, TracedTask
from veritune.model.policy import encode_prompts
from veritune.recipes.config import SFTConfig
from veritune.trainer.batches import safe_rewards
from veritune.trainer.loop import supervised_update, train
from veritune.trainer.optimizer import prepare_optimizer, scheduled_learning_rate
from veritune.trainer.session import Row, Session

TokenPair = tuple[list[int], list[int]]
"""Prompt ids and response ids, the end-of-sequence id included."""


def run(session: Session[SFTConfig]) -> None:
    """Fine-tune the session's policy and leave everything in its run folder."""
    config = session.config
    pairs, counts = load_pairs(session)
    optimizer = prepare_optimizer(session)
    steps_per_epoch = math.ceil(len(pairs) / config.batch_size)
    steps = config.epochs * steps_per_epoch
    if config.warmup_steps > steps:
        raise ConfigError(
            f"warmup_steps is {config.warmup_steps}; it must be at most the {steps} steps of these traces"
        )

    def update(step: int) -> Row:
        epoch, place = divmod(step - 1, steps_per_epoch)
        order = list(range(len(pairs)))
        random.Random(derive_seed(config.seed, epoch, "data order")).shuffle(order)
        batch = [pairs[row] for row in order[place * config.batch_size : (place + 1) * config.batch_size]]
        learning_rate = scheduled_learning_rate(config.learning_rate, step, steps, config.warmup_steps, config.schedule)
        return {**supervised_update(session, step, optimizer, batch, learning_rate), "epoch": epoch + 1, **counts}

    train(session, optimizer, steps=steps, update=update)


def load_pairs(session: Session[SFTConfig]) -> tuple[list[TokenPair], Row]:
    """The traces to train on as ids, and how many there were, were kept and are unique."""
    config = session.config
    rows = read_traces(config.traces) if config.traces else task_traces(session.task, config.seed)
    total = len(rows)
    if config.filter_correct:
        scores = safe_rewards(session, "traces", [_pair(row) for row in rows])
        rows = [row for row, score in zip(rows, scores, strict=True) if score.answer_reward >= 1]
    kept = len(rows)
    unique = list({(row["prompt"], row["response"]): row for row in rows}.values())
    random.Random(derive_seed(config.seed, 0, "unique examples")).shuffle(unique)
    unique = unique[: config.unique_examples]
    if not unique:
        raise DataError(f"no traces are left to train on: {total} were read, {kept} kept")
    end = session.policy.end_of_response
    prompts = encode_prompts(session.policy, [row["prompt"] for row in unique])
    pairs = [
        (prompt, [*session.policy.encode(row["response"]), end]) for prompt, row in zip(prompts, unique, strict=True)
    ]
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    if longest > session.policy.context_length:
        raise DataError(
            f"a trace has {longest} tokens, prompt and response, but the policy's context holds "
            f"{session.policy.context_length}; leave such traces out"
        )
    return pairs, {"traces_read": total, "traces_kept": kept, "traces_unique": len(unique)}


def task_traces(task: Task, seed: int) -> list[dict[str, Any]]:
    """The traces that the task writes for its own training examples."""
    if not isinstance(task, TracedTask):
        raise DataError(f"task {task.name} writes no traces of its own; give a file with --traces")
    return [
        {"prompt": task.prompt(example), "response": response, "ground_truth": example.ground_truth}
        for example, response in task.traces(seed)
    ]


def read_traces(path: Path) -> list[dict[str, Any]]:
    """Rows of {prompt, response}; a broken one is a DataError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number}: not valid JSON: {error}") from error
        for column in ("prompt", "response"):
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                raise DataError(f"{path} line {number}: {column!r} must be a string")
        if not row["prompt"]:
            raise DataError(f"{path} line {number}: 'prompt' is empty; a response needs at least one token before it")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: the file has no rows")
    return rows


def _pair(row: dict[str, Any]) -> tuple[str, Any]:
    if "ground_truth" not in row:
        raise DataError("filter_correct is on, but a trace has no 'ground_truth' to grade its response with")
    return row["response"], row["ground_truth"]
