"""What every training recipe shares: how a step begins, the optimiser, checkpoint and resume, and the loop."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from veritune.core.budget import Pace
from veritune.core.config import CommonConfig
from veritune.core.errors import CheckpointError, DataError, EngineError, Interrupted, RewardError, TrainingError
from veritune.core.randomness import derive_seed
from veritune.core.run_folder import OPTIMIZER, Checkpoint, RunFolder
from veritune.core.signals import stop_requests
from veritune.core.types import Completion, Engine, Example, Group, Pairs, RewardFunction, Sampling, Score, Task
from veritune.engines.weight_check import load_proven_weights
from veritune.grading import OneByOne
from veritune.model.parallel import ALONE, Workers, share_rows
from veritune.model.policy import Policy, checkpoint_activations, encode_prompts, save_policy, trained_parameters
from veritune.trainer.evaluate import evaluate, log_generations
from veritune.trainer.microbatches import prove_packing, supervised_rank_backward

Schedule = Literal["constant", "linear", "cosine"]


# --- What a step begins with -------------------------------------------------------------------------------------


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


class Stopwatch:
    """Seconds of each stage of a step, one lap after another."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, stage: str) -> dict[str, float]:
        """End `stage` now; returns the seconds of every stage so far."""
        now = time.perf_counter()
        self._laps[stage], self._began = now - self._began, now
        return dict(self._laps)


# --- Optimiser ---------------------------------------------------------------------------------------------------


def make_optimizer(
    model: torch.nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; norms and biases are not decayed."""
    trained = trained_parameters(model).values()
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def scheduled_learning_rate(peak: float, step: int, total_steps: int, warmup_steps: int, schedule: Schedule) -> float:
    """The learning rate of update `step` (1 to `total_steps`): linear warm-up to `peak`, then the schedule.

    "linear" and "cosine" fall towards zero, which they would reach one update after the last.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps - 1) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def clip_and_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, learning_rate: float, clip_grad_norm: float
) -> float:
    """Clip the gradient's norm, update, clear the gradient; returns the norm before clipping.

    A gradient that is not finite raises TrainingError before any weight changes.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm))
    if not math.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm}; the update was refused")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


# --- Checkpoint and resume ---------------------------------------------------------------------------------------


def save_checkpoint(run: RunFolder, step: int, policy: Policy, optimizer: torch.optim.Optimizer, *, keep: int) -> Path:
    """Policy and optimiser after `step` updates; nothing else is state, and nothing is pickled."""

    def write(folder: Path) -> None:
        try:
            save_policy(policy, folder)
            save_file(_optimizer_tensors(policy.model, optimizer), folder / OPTIMIZER)
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {folder}: {error}") from error

    return run.save_checkpoint(step, write, keep)


def restore_optimizer(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimiser state, bit for bit; its policy is loaded from the same folder beforehand."""
    tensors = load_file(checkpoint.folder / OPTIMIZER)
    for name, parameter in trained_parameters(policy.model).items():
        state = {kind: tensors.get(f"{name}/{kind}") for kind in ("step", "exp_avg", "exp_avg_sq")}
        if state["step"] is not None:  # a parameter that has had no gradient yet has no state
            optimizer.state[parameter] = {k: t.to(parameter.device) for k, t in state.items() if t is not None}


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{kind}": value.detach().cpu().contiguous()
        for name, parameter in trained_parameters(model).items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


# --- The loop ----------------------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """What a recipe is given: its config and everything that the config named."""

    config: Any
    policy: Policy
    task: Task
    engine: Engine
    run: RunFolder
    checkpoint: Checkpoint | None = None
    """Where a resumed run starts; `policy` has been loaded from it."""
    listen: Callable[[Row], None] = lambda row: None
    """Told every row of metrics."""
    began: float = field(default_factory=time.perf_counter)
    """When the work began, loading included, on the clock of `time.perf_counter`."""
    workers: Workers = ALONE
    """The processes that share the work; this one alone by default."""
    rewards: RewardFunction | None = None
    """The task's rewards in processes with limits; by default they are computed here."""

    @property
    def device(self) -> torch.device:
        return next(self.policy.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.policy.model.parameters()).dtype


def prepare_optimizer(session: Session) -> torch.optim.AdamW:
    """The config's AdamW, with the checkpoint's state if there is one, for a policy proved to train as it computes."""
    config = session.config
    prove_packing(session.policy, config.policy)
    session.workers.everywhere(session.policy, prepare_model, config.activation_checkpointing)
    optimizer = make_optimizer(
        session.policy.model,
        learning_rate=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    if session.checkpoint:
        restore_optimizer(session.checkpoint, session.policy, optimizer)
    return optimizer


def prepare_model(policy: Policy, activation_checkpointing: bool) -> None:
    """Take dropout out of the model, and have it keep each layer's input alone if asked."""
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):  # its draws could not be addressed, and would move the ratio from one
            module.p = 0.0
    if activation_checkpointing:
        checkpoint_activations(policy.model)


def serve_policy(session: Session, *, version: int) -> None:
    """Have the engine serve the policy's present weights as `version`, and prove that it does (EngineError)."""
    load_proven_weights(session.engine, session.policy.model, version, session.config.engine_settings.number_type)


def sample_and_grade(
    session: Session, step: int, purpose: str, examples: Sequence[Example], *, n: int, version: int
) -> list[Group]:
    """n graded responses for each example, from the weights that the engine was given last, proved to be `version`."""
    prompts_ids = encode_prompts(session.policy, map(session.task.prompt, examples))
    sampling = sampling_of(session.config, step, purpose, stop=session.task.stop, n=n)
    groups = evaluate(session.engine, partial(safe_rewards, session, f"step {step}"), examples, prompts_ids, sampling)
    require_version([group.completions for group in groups], version)
    return groups


def safe_rewards(session: Session, where: str, pairs: Pairs) -> list[Score]:
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


def validate(session: Session, step: int) -> Row:
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


def train(session: Session, optimizer: torch.optim.Optimizer, *, steps: int, update: Callable[[int], Row]) -> None:
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
    session: Session,
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
