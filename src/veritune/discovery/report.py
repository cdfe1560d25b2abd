"""The report of a run: methodology, score by round, breakthroughs and failures, final score, cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veritune.discovery.events import Event
from veritune.discovery.history import Attempt
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
_SEARCH_NOTE = (
    "No language model took part: the programs are the shipped search. **Construction**: the shape of the set is "
    "given, not found: the better of the roots of D_d (squared norm 2) and the shell ±2e_i with all sixteen sign "
    "patterns on the words of a constant-weight code (squared norm 4). **Search**: the code itself, four-subsets that "
    "meet pairwise in at most two points, comes from tabu search, and later rounds throw out a tenth of the best set "
    "and repair it by tabu search among all integer vectors of squared norm 4."
)


def draw_scores(path: Path, played: Sequence[Attempt], problem: Problem) -> str | None:
    """Draws the best score of each round and the best so far; the file's name, or None before any valid score."""
    rounds = _best_by_round(played, problem)
    if not rounds:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    so_far: list[int] = []
    for _, score in rounds:
        so_far.append(score if not so_far or problem.better(score, so_far[-1]) else so_far[-1])
    numbers = [number for number, _ in rounds]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(numbers, so_far, where="post", label="best so far")
    axes.plot(numbers, [score for _, score in rounds], "o", label="best of the round")
    if problem.best_known is not None:
        axes.axhline(
            problem.best_known.value, linestyle=":", color="grey", label=f"best known ({problem.best_known.value})"
        )
    axes.set_xlabel("round")
    axes.set_ylabel("score")
    axes.set_title(f"{problem.name}, dimension {problem.dimension}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    aside = path.with_name(f".{path.name}.writing")
    figure.savefig(aside, format="png", dpi=120)
    os.replace(aside, path)
    return path.name


def _best_by_round(played: Sequence[Attempt], problem: Problem) -> list[tuple[int, int]]:
    """(round, best valid score), for the rounds that have one."""
    found: dict[int, int] = {}
    for attempt in played:
        if attempt.score is not None and (
            attempt.round not in found or problem.better(attempt.score, found[attempt.round])
        ):
            found[attempt.round] = attempt.score
    return sorted(found.items())


def report_text(
    events: Sequence[Event], played: Sequence[Attempt], leader: Attempt | None, problem: Problem, figure: str | None
) -> str:
    """The whole `report.md`."""
    parts = [
        f"# {problem.name}, dimension {problem.dimension}",
        _result(leader, problem),
        "## Methodology",
        _methodology(events, problem),
        "## Score by round",
        f"![Score by round]({figure})" if figure else "No valid candidate yet.",
        _round_table(played, problem),
        "## Breakthroughs",
        *(_breakthroughs(played, problem) or ["None."]),
        "## Failures",
        *(_failures(played) or ["None."]),
        "## Cost",
        _cost(events, played),
    ]
    return "\n\n".join(parts) + "\n"


def _result(leader: Attempt | None, problem: Problem) -> str:
    known = problem.best_known
    context = f"Proven bound: {problem.bound} ({problem.bound_source})."
    if known is not None:
        context = f"Best known: {known.value} ({known.source}, {known.date}). {context}"
    if leader is None or leader.verdict is None:
        return f"**Final score: none; no candidate was valid.** {context}"
    return f"**Final score: {leader.score}** (`{leader.id}`). {leader.verdict.message}. {context}"


def _methodology(events: Sequence[Event], problem: Problem) -> str:
    config = events[0]["config"]
    strategies = "; ".join(f"{name}: {_STRATEGIES[name]}" for name in config["strategy"])
    proposer = (
        _SEARCH_NOTE
        if config["proposer"] == "search"
        else f"Programs were written by the model `{config.get('engine.model')}`."
    )
    missing = "; ".join(f"{layer}: {why}" for layer, why in events[0]["missing_layers"].items()) or "none"
    return (
        f"{problem.statement}\n\n{proposer}\n\nStrategies ({strategies}). Every program ran in a sandbox "
        f"({events[0]['sandbox']}; missing: {missing}) for at most {config['program_seconds']:g} s; what it left was "
        "treated as data and verified by the parent process in exact integer arithmetic."
    )


def _round_table(played: Sequence[Attempt], problem: Problem) -> str:
    scores = dict(_best_by_round(played, problem))
    rows = ["| round | answers | valid | best score |", "|---|---|---|---|"]
    for number in sorted({attempt.round for attempt in played}):
        own = [attempt for attempt in played if attempt.round == number]
        answered = sum(attempt.answer is not None for attempt in own)
        valid = sum(attempt.score is not None for attempt in own)
        rows.append(f"| {number} | {answered} | {valid} | {scores.get(number, '–')} |")
    return "\n".join(rows)


def _breakthroughs(played: Sequence[Attempt], problem: Problem) -> list[str]:
    """Every attempt that beat all before it, with the words it came with."""
    sections = []
    record: int | None = None
    for attempt in played:
        if attempt.score is not None and (record is None or problem.better(attempt.score, record)):
            record = attempt.score
            sections.append(f"### Score {record} (`{attempt.id}`)\n\n{_quoted(prose(attempt.answer or ''))}")
    return sections


def _failures(played: Sequence[Attempt]) -> list[str]:
    """Verdicts against a candidate and requests without an answer: each kind quoted once, the frequent ones first."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for attempt in played:
        said = attempt.failure
        if attempt.verdict is not None and not attempt.verdict.valid:
            said = attempt.verdict.message
        if said is not None:
            last_line = said.strip().rpartition("\n")[2]
            kinds.setdefault(last_line, []).append((attempt.id, said))
    failed = sum(map(len, kinds.values()))
    sections = [f"{failed} of {len(played)} attempts."] if failed else []
    for found in sorted(kinds.values(), key=len, reverse=True)[:_QUOTED_FAILURES]:
        first_id, said = found[0]
        sections.append(f"### `{first_id}` ({len(found)} of {failed} failures)\n\n{_quoted(said, from_end=True)}")
    return sections


def _quoted(text: str, *, from_end: bool = False) -> str:
    """`text` in a fence that it cannot leave, shortened in the middle of nowhere but never silently."""
    shown = text[-_QUOTED_CHARACTERS:] if from_end else text[:_QUOTED_CHARACTERS]
    note = "" if shown == text else f"\n\n({len(text)} characters, shortened.)"
    fence = fence_for(shown)
    return f"{fence}text\n{shown.strip()}\n{fence}{note}"


def _cost(events: Sequence[Event], played: Sequence[Attempt]) -> str:
    total: dict[str, Any] = {
        name: sum(getattr(attempt, name) for attempt in played)
        for name in ("prompt_tokens", "completion_tokens", "cost")
    }
    retries = sum(event["type"] == "retry" for event in events)
    stops = [event["reason"] for event in events if event["type"] == "stop"]
    return (
        f"{sum(a.answer is not None for a in played)} answers, {retries} retries, "
        f"{total['prompt_tokens']} prompt tokens, {total['completion_tokens']} answer tokens, "
        f"{total['cost']:.4f} US dollars, {events[-1]['elapsed']:.1f} s. "
        f"Ended: {stops[-1] if stops else 'still running'}."
    )
