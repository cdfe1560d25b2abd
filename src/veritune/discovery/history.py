"""What the event log says happened, and whom the next prompt builds upon: pure functions of the events."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from veritune.discovery.config import DiscoverConfig
from veritune.discovery.events import Event
from veritune.discovery.problem import Problem, Verdict

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request and what came of it; fields are None until their event is in the log."""

    id: str
    round: int
    island: int
    sample: int
    messages: list[Message]
    answer: str | None = None
    finish_reason: str | None = None
    failure: str | None = None
    """Why no answer came, after all retries."""
    program: str | None = None
    verdict: Verdict | None = None
    candidate: Any = None
    """The verified points; kept only where they beat everything before them."""
    sandbox: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    """From the request to its answer."""

    @property
    def is_open(self) -> bool:
        """Whether it waits for its answer."""
        return self.answer is None and self.failure is None

    @property
    def score(self) -> int | None:
        """The score of a valid candidate, else None."""
        return self.verdict.score if self.verdict is not None and self.verdict.valid else None


_TOLD = {
    "request": ("id", "round", "island", "sample", "messages"),
    "answer": ("answer", "finish_reason", "prompt_tokens", "completion_tokens", "cost", "seconds"),
    "verdict": ("program", "candidate", "sandbox"),
}
"""The fields of an attempt that an event holds under the same name."""


def attempts(events: Sequence[Event]) -> dict[str, Attempt]:
    """Attempts by id, judged ones first and in the order of their verdicts: the order that decides ties."""
    found: dict[str, Attempt] = {}
    judged: dict[str, Attempt] = {}
    for event in events:
        told = {name: event[name] for name in _TOLD.get(event["type"], ())}
        match event["type"]:
            case "request":
                found[event["id"]] = Attempt(**told)
            case "answer":
                found[event["id"]] = replace(found[event["id"]], **told)
            case "failure":
                found[event["id"]] = replace(found[event["id"]], failure=event["error"])
            case "verdict":
                verdict = Verdict(event["valid"], event["score"], event["message"])
                judged[event["id"]] = replace(found.pop(event["id"]), verdict=verdict, **told)
    return judged | found


def best(candidates: Iterable[Attempt], problem: Problem) -> Attempt | None:
    """The valid attempt with the best score, the first of equals."""
    valid = [(attempt.score, attempt) for attempt in candidates if attempt.score is not None]
    return max(valid, key=lambda each: problem.rank(each[0]), default=(0, None))[1]


def parent_of(
    past: Sequence[Attempt], problem: Problem, config: DiscoverConfig, round_index: int, island: int
) -> Attempt | None:
    """The program that the prompt of `island` shows: none, the best of all, or one of the island's by score."""
    if "islands" in config.strategy:
        population = _population(past, problem, config, round_index, island)
        if not population:
            return None
        ranked = sorted(population, key=lambda attempt: problem.rank(attempt.score or 0), reverse=True)
        draw = random.Random(f"{config.seed} parent {round_index} {island}")
        return draw.choices(ranked, weights=[1 / (rank + 1) ** 2 for rank in range(len(ranked))])[0]
    return best(past, problem) if "refine" in config.strategy else None


def _population(
    past: Sequence[Attempt], problem: Problem, config: DiscoverConfig, round_index: int, island: int
) -> list[Attempt]:
    """The island's valid attempts, and what its neighbour's best was at every migration so far."""
    own = [a for a in past if a.score is not None and a.island == island]
    neighbour = [a for a in past if a.island == (island - 1) % config.populations]
    for migration in range(config.migration_interval, round_index + 1, config.migration_interval):
        migrant = best([a for a in neighbour if a.round < migration], problem)
        if migrant is not None and migrant not in own:
            own.append(migrant)
    return own


def last_of(past: Sequence[Attempt], problem: Problem, config: DiscoverConfig, island: int) -> Attempt | None:
    """The attempt whose verdict goes back under `refine`: the best of the island's last judged round."""
    if "refine" not in config.strategy:
        return None
    own = [a for a in past if a.verdict is not None and a.island == island]
    if not own:
        return None
    last_round = max(a.round for a in own)
    latest = [a for a in own if a.round == last_round]
    return best(latest, problem) or latest[0]
