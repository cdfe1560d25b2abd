"""The loop around every training recipe's steps: validate, checkpoint, record, and stop in time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from veritune.core.budget import Pace
from veritune.core.config import CommonConfig, TrainingConfig
from veritune.core.errors import Interrupted, TrainingError
from veritune.core.run_folder import RunFolder
from veritune.core.signals import stop_requests
from veritune.model.parallel import share_rows
from veritune.trainer.batches import (
    examples_of,
    sample_and_grade,
    serve_policy,
)
from veritune.trainer.checkpoint import save_checkpoint
from veritune.trainer.evaluate import log_generations
from veritune.trainer.microbatches import supervised_rank_backward
from veritune.trainer.optimizer import (
    clip_and_step,
)
from veritune.trainer.session import Row, Session


def validate(session: Session[CommonConfig], step: int) -> Row:
    """One sampled response for each held-out problem, at the training temperature; every response is kept."""
    began = time.perf_counter()
    examples = examples_of(session.task, "validation")[: session.config.validation_examples]
    serve_policy(session, version=step)
    groups = sample_and_grade(session, step, "validation", examples, n=1, version=step)
    summary = log_generations(groups, lambda rows: session.run.write_rows("validation", step, rows))
    seconds = time.perf_counter() - began
    return {
        **{f"validation_{name}": value for name, value in summary.items()},
        "seconds_validate": seconds,
    }


def train(
    session: Session[TrainingConfig], optimizer: torch.optim.Optimizer, *, steps: int, update: Callable[[int], Row]
) -> None:
    """Call `update(step)` from the checkpoint's step + 1 to `steps`, validate and checkpoint on time, record every row.

    `update` returns metrics. With `budget_seconds`, the last step is the one after which another would leave no room
    for the last validation and checkpoint; a row's `steps` is then what the pace so far allows. Ctrl-C,
    SIGTERM and SIGHUP end the run after the step in progress, with a checkpoint and an Interrupted that says how to
    resume; a second Ctrl-C at once.
    """
    config, run = session.config, session.run
    budget = math.inf if config.budget_seconds is None else config.budget_seconds
    spent_before, pace = run.seconds_spent(), Pace.of(run.metrics())

    def elapsed() -> float:
        return spent_before + time.perf_counter() - session.began

    def record(row: Row) -> None:
        row["seconds_elapsed"] = elapsed()
        run.append_metrics(row)
        session.listen(row)

    start = session.checkpoint.step if session.checkpoint else 0
    if start == 0:
        measured = validate(session, 0)
        pace.validations.append(measured["seconds_validate"])
        record({"step": 0, "steps": steps, **measured})
        if pace.updates_left(budget - elapsed()) == 0:
            raise TrainingError(
                f"budget_seconds is {budget:g}, but loading and the first validation took {elapsed():.0f} s, which "
                "leaves no time for an update and another validation"
            )
    elif pace.updates_left(budget - elapsed()) == 0:
        record({"step": start, "steps": start, **validate(session, start)})
        return
    with stop_requests() as stop_requested:
        for step in range(start + 1, steps + 1):
            began = time.perf_counter()
            row = {"step": step, **update(step)}
            pace.updates.append(time.perf_counter() - began)
            is_due = step % config.validate_every == 0
            more = pace.updates_left(budget - elapsed() - (pace.validation() if is_due else 0))
            last = step == steps or more == 0
            row["steps"] = step if last else int(min(steps, step + more))
            if last or is_due:
                row |= validate(session, step)
                pace.validations.append(row["seconds_validate"])
            record(row)
            stopped_by = stop_requested()
            if last or stopped_by or step % config.checkpoint_every == 0:
                began = time.perf_counter()
                save_checkpoint(run, step, session.policy, optimizer, keep=config.keep_checkpoints)
                pace.checkpoints.append(time.perf_counter() - began)
            if last:
                return
            if stopped_by:
                raise Interrupted(f"stopped after step {step}; resume with: veritune resume {run.path}", stopped_by)


def supervised_update(
    session: Session[TrainingConfig],
    step: int,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    learning_rate: float,
) -> Row:
    """One optimiser step on the mean negative log-likelihood of the response tokens of (prompt ids, response ids)."""
    config, policy, workers = session.config, session.policy, session.workers
    began = time.perf_counter()
    prompts, responses = [prompt for prompt, _ in pairs], [response for _, response in pairs]
    response_tokens = sum(map(len, responses))
    shares = share_rows(range(len(pairs)), prompts, list(map(len, responses)), workers.count)

    def rows() -> list[Row]:
        return [{"prompt_ids": list(prompt), "response_ids": list(response)} for prompt, response in pairs]

    with refused_on_error(session.run, step, rows):
        losses = workers.add_gradients(
            policy,
            supervised_rank_backward,
            [([pairs[row] for row in share], response_tokens, config.microbatch_tokens) for share in shares],
        )
        norm = clip_and_step(policy.model, optimizer, learning_rate=learning_rate, clip_grad_norm=config.clip_grad_norm)
    seconds = time.perf_counter() - began
    return {
        "loss": sum(losses),
        "grad_norm": norm,
        "learning_rate": learning_rate,
        "train_tokens": sum(map(len, prompts)) + response_tokens,
        "train_tokens_per_second": (sum(map(len, prompts)) + response_tokens) / seconds,
        "seconds_train": seconds,
    }


@contextlib.contextmanager
def refused_on_error(run: RunFolder, step: int, rows: Callable[[], Iterable[Row]]) -> Iterator[None]:
    """Where an update cannot be taken, save its batch under refused/ and say where it lies."""
    try:
        yield
    except TrainingError as error:
        run.write_rows("refused", step, rows())
        raise TrainingError(
            f"step {step} was refused: {error}. The batch is in {run.path / 'refused'}; the last checkpoint is intact"
        ) from error
