"""Who writes the programs: a model behind an OpenAI-compatible endpoint, or the shipped search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError
from veritune.core.http import OPENAI, Endpoint, EndpointSettings, ask_patiently, completions_endpoint, require_type
from veritune.discovery.config import DiscoverConfig
from veritune.discovery.history import Attempt, Message

_MOST_TOKENS = 10**9
_SEARCH_PROGRAM = Path(__file__).with_name("search_program.py")
_SEARCH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a proposer wrote."""

    answer: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a proposer is asked; a model reads the messages, the search builds on the parent's points."""

    messages: list[Message]
    parent: Attempt | None
    draw: int
    """Differs for every request of a run, and is the same when the request is repeated after a resume."""
    seconds_left: float
    """No answer is waited for longer than this, retries included."""


Report = Callable[[str, float], None]
"""Told of every failed attempt that will be retried: (error, seconds until the next)."""
Proposer = Callable[[Request, Report], Answer]


def model_endpoint(config: DiscoverConfig) -> Endpoint | None:
    """Where the model is asked, None for the shipped search; OpenAI's own endpoint does not do without a key."""
    engine = config.engine_settings
    if not isinstance(engine, EndpointSettings):
        return None
    if not engine.api_key and engine.url == OPENAI:
        raise ConfigError(f"engine.api_key_env is {engine.api_key_env!r}, and that environment variable is not set")
    return completions_endpoint(engine.url, engine.api_key)


def build_proposer(config: DiscoverConfig, endpoint: Endpoint | None) -> Proposer:
    """The proposer of `config`: the model at `endpoint`, or the shipped search."""
    return _search_proposer(config) if endpoint is None else _model_proposer(config, endpoint)


def _search_proposer(config: DiscoverConfig) -> Proposer:
    program = _SEARCH_PROGRAM.read_text()
    seconds = min(_SEARCH_SECONDS, config.program_seconds / 2)

    def propose(request: Request, report: Report) -> Answer:
        start = request.parent.candidate if request.parent is not None else None
        idea = (
            "Construction: the better of two shells of Z^d, one built on a constant-weight code that tabu search finds."
            if start is None
            else "Search: perturb the best set so far, repair it by tabu search, keep the largest."
        )
        call = f"search(dimension={config.dimension}, seed={request.draw}, seconds={seconds}, start={start or []})"
        code = f"{program}\n\ndef run_code():\n    points = {call}\n    return (points,)\n"
        return Answer(f"{idea}\n\n```python\n{code}```\n", "stop", 0, 0)

    return propose


def _model_proposer(config: DiscoverConfig, endpoint: Endpoint) -> Proposer:
    # OpenAI's own models refuse the name that every other server knows.
    engine = config.engine_settings
    limit_name = "max_completion_tokens" if engine.url == OPENAI else "max_tokens"

    def propose(request: Request, report: Report) -> Answer:
        payload = {
            "model": engine.model,
            "messages": request.messages,
            "temperature": config.temperature,
            limit_name: config.max_answer_tokens,
        }
        until = time.monotonic() + request.seconds_left

        def ask() -> Answer:
            seconds = max(0.0, min(engine.seconds, until - time.monotonic()))
            answer = endpoint.post("/chat/completions", payload, seconds=seconds, tokens=config.max_answer_tokens)
            with endpoint.reading("a chat completion"):
                return _answer(answer)

        return ask_patiently(ask, retries=engine.retries, until=until, report=report)

    return propose


def _answer(answer: Any) -> Answer:
    """The first choice; a missing count is 0."""
    choice = require_type(answer["choices"], list)[0]
    usage = answer.get("usage")
    return Answer(
        answer=require_type(choice["message"]["content"], str, type(None)) or "",
        finish_reason=str(require_type(choice.get("finish_reason"), str, type(None))),
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 < value < _MOST_TOKENS else 0
