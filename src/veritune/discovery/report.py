"""The report of a run: methodology, score by round, breakthroughs and failures, final score, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate

from veritune.discovery.events import Event
from veritune.discovery.history import Attempt, best
from veritune.discovery.problem import Problem
from veritune.discovery.prompts import fence_for, prose

_QUOTED_FAILURES = 10
_QUOTED_CHARACTERS = 1500
_STRATEGIES = {
    "prompt": "the statement alone is asked",
    "refine": "the last verdict goes back word for word, with the best program so far",
    "best-of-n": "several answers to each prompt, of which the verifier selects",
    "islands": "separate populations, parents drawn by score, the best migrating to the next island",
}


@dataclass(frozen=True, slots=True)
class Round:
    """The counts of one round, and the best score of a valid candidate, if any."""

    number: int
    answers: int
    valid: int
    best: int | None


def rounds_of(played: Sequence[Attempt], problem: Problem) -> list[Round]:
    """Every round that was begun, in order."""
    rounds = []
    for number in sorted({attempt.round for attempt in played}):
        own = [attempt for attempt in played if attempt.round == number]
        answers, valid = sum(a.answer is not None for a in own), sum(a.score is not None for a in own)
        leader = best(own, problem)
        rounds.append(Round(number, answers, valid, leader.score if leader else None))
    return rounds


def draw_scores(rounds: Sequence[Round], problem: Problem) -> bytes | None:
    """The best score of each round and the best so far, as PNG; None before any valid score."""
    scores = {each.number: each.best for each in rounds if each.best is not None}
    if not scores:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    so_far: list[int] = list(accumulate(scores.values(), problem.better_of))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(list(scores), so_far, where="post", label="best so far")
    axes.plot(list(scores), list(scores.values()), "o", label="best of the round")
    if problem.best_known is not None:
        known = problem.best_known.value
        axes.axhline(known, linestyle=":", color="grey", label=f"best known ({known})")
    axes.set(xlabel="round", ylabel="score", title=f"{problem.name}, dimension {problem.dimension}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return drawn.getvalue()


def report_text(
    events: Sequence[Event], played: Sequence[Attempt], rounds: Sequence[Round], problem: Problem, has_figure: bool
) -> str:
    """The whole `report.md`; `has_figure` says whether score_by_round.png lies beside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    stops = [event["reason"] for event in events if event["type"] == "stop"]
    kinds = _failures(played)
    environment = Environment(
        loader=PackageLoader("veritune.discovery", "."), undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"fence": fence_for, "prose": lambda answer: prose(answer or "")}
    return environment.get_template("report.md.jinja").render(
        start=events[0],
        config=events[0]["config"],
        problem=problem,
        strategies=_STRATEGIES,
        leader=best(played, problem),
        played=played,
        rounds=rounds,
        records=_records(played, problem),
        has_figure=has_figure,
        kinds=kinds[:_QUOTED_FAILURES],
        failed=sum(count for _, _, count in kinds),
        quoted_characters=_QUOTED_CHARACTERS,
        retries=sum(event["type"] == "retry" for event in events),
        elapsed=events[-1]["elapsed"],
        reason=stops[-1] if stops else "still running",
    )


def _records(played: Sequence[Attempt], problem: Problem) -> list[Attempt]:
    """Every attempt that beat all before it."""
    records: list[Attempt] = []
    for attempt in played:
        if attempt.score is not None and problem.better(attempt.score, records[-1].score if records else None):
            records.append(attempt)
    return records


def _failures(played: Sequence[Attempt]) -> list[tuple[str, str, int]]:
    """(id, words, number) of each kind of refused candidate and of unanswered request, the frequent ones first.

    The words are the first of their kind; the last line makes the kind.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for attempt in played:
        verdict = attempt.verdict
        said = attempt.failure if verdict is None or verdict.valid else verdict.message
        if said is not None:
            kinds.setdefault(said.strip().rpartition("\n")[2], []).append((attempt.id, said))
    return [(*found[0], len(found)) for found in sorted(kinds.values(), key=len, reverse=True)]
