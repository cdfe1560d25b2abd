"""pass@N, Best@N by the policy's own likelihood, and majority vote, from one pool of samples a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError, DataError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Group, Score
from veritune.recipes.config import BestOfNConfig
from veritune.trainer.batches import examples_of, sample_and_grade, serve_policy
from veritune.trainer.evaluate import log_generations, several_samples
from veritune.trainer.session import Row, Session, Stopwatch


def run(session: Session[BestOfNConfig]) -> None:
    """Leave one row of metrics for each N, and every response, in the run folder."""
    config, clock = session.config, Stopwatch()
    examples = examples_of(session.task, "validation")[: config.validation_examples]
    first = reused_samples(config.reuse, examples) if config.reuse else {}
    fresh = max(config.samples) - (1 if first else 0)
    if config.engine_settings.can_load_weights:  # an endpoint serves what it serves
        serve_policy(session, version=0)
    groups = [Group(example, [], []) for example in examples]
    if fresh:
        groups = sample_and_grade(session, 0, "best of n", examples, n=fresh, version=0)
    if first:
        groups = [join(first[example.id], group) for example, group in zip(examples, groups, strict=True)]
    seconds = clock.lap("rollout")["rollout"]
    summary = log_generations(groups, lambda rows: session.run.write_rows("validation", 0, rows))
    row: Row = {
        "step": 0,
        "steps": 0,
        **{f"validation_{name}": value for name, value in summary.items()},
        **{
            f"{name}_at_{n}": value
            for n in sorted(set(config.samples))
            for name, value in several_samples(groups, n).items()
        },
        "seconds_elapsed": seconds,
    }
    session.run.append_metrics(row)
    session.listen(row)


def reused_samples(path: Path, examples: Sequence[Example]) -> dict[str, tuple[Completion, Score]]:
    """The one response that the run at `path` has for each example; DataError where it lacks one."""
    rows: dict[str, Mapping[str, Any]] = {row["id"]: row for row in RunFolder.open(path).read_rows("validation", 0)}
    missing = [example.id for example in examples if example.id not in rows]
    if missing:
        raise DataError(f"{path} has no response for example {missing[0]}; it was made with other problems")
    if any(rows[example.id]["question"] != example.question for example in examples):
        raise ConfigError(f"reuse is {path}, but its questions are not those of this task")
    return {example.id: _from_row(rows[example.id]) for example in examples}


def _from_row(row: Mapping[str, Any]) -> tuple[Completion, Score]:
    completion = Completion(
        tuple(row["prompt_ids"]),
        tuple(row["response_ids"]),
        row["response"],
        tuple(row["logprobs"]),
        row["finish_reason"],
        row["weights_version"],
    )
    return completion, Score(**row["score"])


def join(first: tuple[Completion, Score], group: Group) -> Group:
    """The group with the reused sample in front of its own."""
    return Group(group.example, [first[0], *group.completions], [first[1], *group.scores])
