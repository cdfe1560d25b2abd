"""Who writes the programs: a model behind an OpenAI-compatible endpoint, or the shipped search."""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError
from veritune.discovery.config import DiscoverConfig
from veritune.discovery.history import Attempt, Message

_LONGEST_WAIT_SECONDS = 60.0
_RETRIED_STATUSES = (408, 409, 425, 429)
_SHOWN_ERROR_CHARACTERS = 1000
_SEARCH_PROGRAM = Path(__file__).with_name("search_program.py")
_SEARCH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a proposer wrote.

    >>> Answer("Use the roots of D11: ...", "stop", prompt_tokens=900, completion_tokens=1200)
    """

    text: str
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


class ProposalError(Exception):
    """No answer to this request, after all retries."""


Report = Callable[[str, float], None]
"""Told of every failed attempt that will be retried: (error, seconds until the next)."""
Proposer = Callable[[Request, Report], Answer]


def api_key(config: DiscoverConfig) -> str:
    """The endpoint's key from the environment; "" where none is set, which only a given base_url allows."""
    key = os.environ.get(config.api_key_env, "")
    if not key and config.proposer == "model" and config.base_url is None:
        raise ConfigError(f"api_key_env is {config.api_key_env!r}, and that environment variable is not set")
    return key


def build_proposer(config: DiscoverConfig) -> Proposer:
    """The proposer of `config`; raises ConfigError where the openai package is needed and absent."""
    return _search_proposer(config) if config.proposer == "search" else _model_proposer(config)


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


def _model_proposer(config: DiscoverConfig) -> Proposer:
    try:
        openai = importlib.import_module("openai")
    except ImportError as error:
        raise ConfigError("proposer 'model' needs the openai package: pip install 'veritune[discover]'") from error
    client = openai.OpenAI(
        # A local server without a key still gets a header; the client refuses to start without any.
        api_key=api_key(config) or "none",
        base_url=config.base_url,
        timeout=config.request_seconds,
        max_retries=0,
    )

    # OpenAI's own models refuse the name that every other server knows.
    limit_name = "max_completion_tokens" if config.base_url is None else "max_tokens"

    def complete(messages: list[Message]) -> Answer:
        response = client.chat.completions.create(
            model=config.model,
            messages=messages,
            temperature=config.temperature,
            **{limit_name: config.max_answer_tokens},
        )
        return _answer(response)

    def propose(request: Request, report: Report) -> Answer:
        deadline = time.monotonic() + request.seconds_left
        for attempt in range(config.retries + 1):
            try:
                seconds = min(config.request_seconds, max(0.0, deadline - time.monotonic()))
                return _within(seconds, lambda: complete(request.messages))
            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"[:_SHOWN_ERROR_CHARACTERS]
                wait = _wait_seconds(error, config.backoff_seconds * 2**attempt)
                last = attempt == config.retries or time.monotonic() + wait >= deadline
                if last or not _worth_retrying(error, openai):
                    raise ProposalError(text) from error
                report(text, wait)
                time.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    return propose


def _answer(response: Any) -> Answer:
    """The first choice; a body that is no chat completion is a ValueError, a missing count is 0.

    The client hands on whatever the server sent, so every field is checked before it is used.
    """
    choices = getattr(response, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = getattr(choice, "message", None)
    content = getattr(message, "content", None)
    if message is None or not isinstance(content, str | None):
        raise ValueError("the endpoint's answer is not a chat completion with a text in its first choice")
    usage = getattr(response, "usage", None)
    return Answer(
        # A lone surrogate, which JSON can say, could not be sent back in the next prompt.
        text=(content or "").encode("utf-8", "replace").decode(),
        finish_reason=str(getattr(choice, "finish_reason", None)),
        prompt_tokens=_count(getattr(usage, "prompt_tokens", None)),
        completion_tokens=_count(getattr(usage, "completion_tokens", None)),
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _within(seconds: float, function: Callable[[], Answer]) -> Answer:
    """`function()`, or TimeoutError after `seconds`: the client's own timeout starts anew with every byte."""
    outcome: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(function())
        except BaseException as error:  # handed to the waiting thread, whatever it is
            outcome.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        result = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None
    if isinstance(result, BaseException):
        raise result
    return result


def _worth_retrying(error: Exception, openai: Any) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in _RETRIED_STATUSES or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError | TimeoutError)


def _wait_seconds(error: Exception, backoff: float) -> float:
    """The back-off, or what the server asks for in Retry-After where that is longer; a minute at most."""
    response = getattr(error, "response", None)
    asked = response.headers.get("retry-after", "") if response is not None else ""
    try:
        return min(_LONGEST_WAIT_SECONDS, max(backoff, float(asked)))
    except ValueError:  # absent, or a date
        return min(_LONGEST_WAIT_SECONDS, backoff)
