"""Measure a policy as it is: sample a task's problems, grade, count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veritune.recipes.config import EvalConfig
from veritune.trainer.batches import examples_of, sample_and_grade, serve_policy
from veritune.trainer.evaluate import log_generations
from veritune.trainer.session import Row, Session, Stopwatch

CATEGORIES = ("correct", "format1", "format0")
"""Right; well-formed but wrong; not even well-formed."""


def run(session: Session[EvalConfig]) -> None:
    """Leave one row of metrics, and every response, in the run folder."""
    config, clock = session.config, Stopwatch()
    examples = examples_of(session.task, config.split)[: config.validation_examples]
    if config.engine_settings.can_load_weights:  # an endpoint serves what it serves
        serve_policy(session, version=0)
    groups = sample_and_grade(session, 0, "validation", examples, n=1, version=0)
    seconds = clock.lap("validate")["validate"]
    rows: list[Mapping[str, Any]] = []
    summary = log_generations(groups, rows.extend)
    session.run.write_rows("validation", 0, rows)
    counts = {f"count_{name}": sum(category_of(row["score"]) == name for row in rows) for name in CATEGORIES}
    row: Row = {
        "step": 0,
        "steps": 0,
        **{f"validation_{name}": value for name, value in summary.items()},
        **counts,
        "rollouts_per_second": len(rows) / seconds,
        "seconds_elapsed": seconds,
    }
    session.run.append_metrics(row)
    session.listen(row)


def category_of(score: Mapping[str, Any]) -> str:
    """The category of a response from its score as the run folder keeps it."""
    if score["answer_reward"] >= 1:
        return "correct"
    return "format1" if score["format_reward"] >= 1 else "format0"
