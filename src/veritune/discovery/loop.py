"""The loop: ask, run, verify, tell; every step goes through the event log before anything depends on it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError, EngineError, blot_logins
from veritune.core.http import EndpointError
from veritune.core.tables import flat_values
from veritune.discovery.config import DiscoverConfig
from veritune.discovery.evaluate import Evaluation, evaluate_program
from veritune.discovery.events import Event, EventLog
from veritune.discovery.history import Attempt, attempts, best, last_of, parent_of
from veritune.discovery.outputs import write_outputs
from veritune.discovery.problem import Problem, Verdict
from veritune.discovery.problems import build_problem
from veritune.discovery.prompts import build_messages, extract_program
from veritune.discovery.proposers import Proposer, Request, build_proposer, model_endpoint
from veritune.discovery.sandbox import Limits, SandboxLevel, require_sandbox
from veritune.discovery.verification import VerificationLimits

# What a resumed run may change: where and how fast it asks, and when it stops; not what it is.
_CHANGEABLE = (
    "run", "resume", "rounds", "token_budget", "time_budget_seconds", "cost_budget", "input_price", "output_price",
    "stop_at_score", "unsafe_no_sandbox",
    "engine.url", "engine.api_key_env", "engine.seconds", "engine.retries", "engine.concurrency",
)  # fmt: skip


def _say_nothing(line: str) -> None:
    pass


def discover(config: DiscoverConfig, notify: Callable[[str], None] = _say_nothing) -> Path:
    """Runs (or resumes) a discovery and returns its folder.

    The folder holds `events.jsonl`, from which `conversation_log.json`, `best_program.py`, `best_points.json` and
    `report.md` are derived; they are also written when the run is interrupted. `notify` gets a line for each verdict
    and each failed request, from several threads. Raises ConfigError where the sandbox is incomplete, the key is
    missing, or a resumed run would be another run; EngineError where no request at all was answered.
    """
    problem = build_problem(config.problem, config.dimension)
    level = require_sandbox(unsafe=config.unsafe_no_sandbox)
    endpoint = model_endpoint(config)
    proposer = build_proposer(config, endpoint)
    name = re.sub(r"\W+", "-", f"discover {config.problem} {config.dimension} {time.strftime('%Y%m%d %H%M%S')}")
    folder = config.run or Path("runs") / name
    with EventLog(folder, resume=config.resume, secrets=endpoint.secrets if endpoint else ()) as log:
        _begin(log, config, problem, level)
        reason = "interrupted"
        try:
            reason = _run_rounds(_Run(config, problem, level, proposer, log, notify))
        finally:
            log.append("stop", reason=reason)
            write_outputs(folder)
        _refuse_silence(log.events, folder)
    return folder


def _refuse_silence(events: Sequence[Event], folder: Path) -> None:
    """A run that never had an answer was not a search: the endpoint, the key or the model's name is wrong."""
    errors = [event["error"] for event in events if event["type"] == "failure"]
    if errors and not any(event["type"] == "answer" for event in events):
        raise EngineError(f"no request of {folder} was answered; the last error was: {errors[-1]}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    config: DiscoverConfig
    problem: Problem
    level: SandboxLevel
    proposer: Proposer
    log: EventLog
    notify: Callable[[str], None]
    running_programs: threading.Semaphore = dataclasses.field(
        default_factory=lambda: threading.BoundedSemaphore(os.cpu_count() or 1)
    )


def _begin(log: EventLog, config: DiscoverConfig, problem: Problem, level: SandboxLevel) -> None:
    settings = {name: _plain(value) for name, value in flat_values(config).items()}
    if not log.events:
        facts = ("name", "dimension", "statement", "goal", "bound", "bound_source")
        known = None if problem.best_known is None else dataclasses.asdict(problem.best_known)
        described = {name: getattr(problem, name) for name in facts} | {"best_known": known}
        log.append("start", config=settings, problem=described, sandbox=str(level), missing_layers=level.missing)
        return
    first = log.events[0]["config"]
    for name, value in settings.items():
        if name not in _CHANGEABLE and first.get(name, value) != value:
            raise ConfigError(f"{name} is {value!r}, but the run to resume has {first[name]!r}; it must stay the same")
    log.append("resume", config=settings, sandbox=str(level), missing_layers=level.missing)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return blot_logins(str(value)) if isinstance(value, Path | str) else value


def _run_rounds(run: _Run) -> str:
    """Plays the rounds that are not yet played; returns why it stopped."""
    config = run.config
    for round_index in range(config.rounds_in_all):
        past = [a for a in attempts(run.log.events).values() if a.round < round_index]
        leader = best(past, run.problem)
        if leader is not None and leader.score is not None and _good_enough(leader.score, run):
            return f"score {leader.score} reached"
        if reason := _spent_budget(run):
            return reason
        jobs = [
            functools.partial(_play, run, past, round_index, island, sample)
            for island in range(config.populations)
            for sample in range(config.samples_per_prompt)
        ]
        _in_daemon_threads(jobs, config.engine_settings.concurrency)
    return _spent_budget(run) or f"all {config.rounds_in_all} rounds played"


def _good_enough(score: int, run: _Run) -> bool:
    targets = (run.problem.bound, run.config.stop_at_score)
    return any(target is not None and not run.problem.better(target, score) for target in targets)


def _seconds_left(run: _Run) -> float:
    """Of the time budget."""
    budget = run.config.time_budget_seconds
    return math.inf if budget is None else budget - run.log.elapsed()


def _spent_budget(run: _Run) -> str:
    """Which budget is used up, or ""."""
    config = run.config
    if _seconds_left(run) <= 0:
        return f"time budget of {config.time_budget_seconds:g} s used up"
    answers = [event for event in list(run.log.events) if event["type"] == "answer"]
    tokens = sum(event["prompt_tokens"] + event["completion_tokens"] for event in answers)
    if config.token_budget is not None and tokens >= config.token_budget:
        return f"token budget of {config.token_budget} used up"
    if config.cost_budget is not None and sum(event["cost"] for event in answers) >= config.cost_budget:
        return f"cost budget of {config.cost_budget:g} used up"
    return ""


def _play(run: _Run, past: Sequence[Attempt], round_index: int, island: int, sample: int) -> None:
    """One sample from request to verdict, each step only where the log does not hold it yet."""
    attempt_id = f"r{round_index}-i{island}-s{sample}"

    def known() -> Attempt | None:
        return attempts(list(run.log.events)).get(attempt_id)

    attempt = known()
    if (attempt is None or attempt.is_open) and not _spent_budget(run):
        _ask(run, past, round_index, island, sample, attempt_id)
        attempt = known()
    if attempt is not None and attempt.answer is not None and attempt.verdict is None:
        program = extract_program(attempt.answer)
        _log_verdict(run, attempt_id, program, _evaluate(run, program, attempt.finish_reason))


def _ask(run: _Run, past: Sequence[Attempt], round_index: int, island: int, sample: int, attempt_id: str) -> None:
    """One request; its answer, or the failure after all retries, is in the log when this returns."""
    config, log = run.config, run.log
    parent = parent_of(past, run.problem, config, round_index, island)
    messages = build_messages(run.problem, config, parent, last_of(past, run.problem, config, island))
    log.append("request", id=attempt_id, round=round_index, island=island, sample=sample, messages=messages)
    digest = hashlib.sha256(f"{config.seed} {attempt_id}".encode()).digest()
    request = Request(messages, parent, int.from_bytes(digest[:4]), _seconds_left(run))
    started = time.monotonic()
    try:
        answer = run.proposer(request, lambda error, wait: log.append("retry", id=attempt_id, error=error, wait=wait))
    except EndpointError as error:
        if _seconds_left(run) > 0:  # else the budget broke it off, and a resumed run asks again
            log.append("failure", id=attempt_id, error=str(error))
            run.notify(f"{attempt_id}: no answer: {error}")
        return
    cost = (answer.prompt_tokens * config.input_price + answer.completion_tokens * config.output_price) / 1e6
    log.append("answer", id=attempt_id, **dataclasses.asdict(answer), cost=cost, seconds=time.monotonic() - started)


def _evaluate(run: _Run, program: str | None, finish_reason: str | None) -> Evaluation:
    cut = " The answer was cut off at its token limit." if finish_reason == "length" else ""
    if program is None:
        return Evaluation(Verdict(False, 0, f"The answer holds no Python program.{cut}"), None, 0, str(run.level), 0.0)
    limits = Limits(seconds=run.config.program_seconds, memory_mb=run.config.program_memory_mb)
    verification = VerificationLimits(run.config.verification_seconds, run.config.verification_memory_mb)
    with run.running_programs:
        evaluation = evaluate_program(run.problem, program, limits, verification, run.level)
    if evaluation.verdict.valid or not cut:
        return evaluation
    verdict = dataclasses.replace(evaluation.verdict, message=evaluation.verdict.message + cut)
    return dataclasses.replace(evaluation, verdict=verdict)


def _log_verdict(run: _Run, attempt_id: str, program: str | None, evaluation: Evaluation) -> None:
    """The points themselves are kept only where they beat all before: whoever leads the log has them."""
    verdict = evaluation.verdict
    last_line = verdict.message.strip().rpartition("\n")[2]
    run.notify(f"{attempt_id}: score {verdict.score}" if verdict.valid else f"{attempt_id}: refused: {last_line}")
    with run.log.lock:
        leader = best(attempts(run.log.events).values(), run.problem)
        leads = verdict.valid and run.problem.better(verdict.score, leader.score if leader else None)
        told = {"program": program, "sandbox": evaluation.sandbox, "program_seconds": evaluation.seconds}
        candidate = evaluation.points if leads else None
        run.log.append("verdict", id=attempt_id, **dataclasses.asdict(verdict), **told, candidate=candidate)


def _in_daemon_threads(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Runs all jobs, `workers` at a time; the first error is raised here and no further job starts.

    Daemon threads, so that an interrupt need not wait for a server that does not answer.
    """
    waiting = collections.deque((job, Future[None]()) for job in jobs)
    futures = [future for _, future in waiting]

    def work() -> None:
        with contextlib.suppress(IndexError):  # of the empty deque
            while True:
                job, future = waiting.popleft()
                try:
                    job()
                    future.set_result(None)
                except BaseException as error:  # raised again in the main thread
                    future.set_exception(error)

    for _ in range(min(workers, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        waiting.clear()
