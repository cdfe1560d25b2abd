"""Which responses a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veritune.report.collect import Batch, Response, Run

OUTCOMES = ((False, True), (False, False), (True, True), (True, False))
"""Whether a problem was solved (before, after): learned, not learned, kept, unlearned."""


@dataclass(frozen=True)
class Pair:
    """Responses to the same held-out problem before and after training."""

    before: Response
    after: Response

    @property
    def outcome(self) -> tuple[bool, bool]:
        return self.before.correct, self.after.correct


def pair_up(run: Run) -> list[Pair]:
    """The problems that the first and the last validation both asked, in the file's order."""
    if run.before is None or run.after is None:
        return []
    before, after = (
        {name: group[0] for name, group in _by_problem(batch).items()} for batch in (run.before, run.after)
    )
    return [Pair(response, after[name]) for name, response in before.items() if name in after]


def outcome_counts(pairs: Sequence[Pair]) -> dict[tuple[bool, bool], int]:
    """How many problems were solved (before, after)."""
    return {key: sum(pair.outcome == key for pair in pairs) for key in OUTCOMES}


def choose_pairs(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """The first pairs of each of the OUTCOMES in turn."""
    queues = [[pair for pair in pairs if pair.outcome == outcome] for outcome in OUTCOMES]
    turns = [queue[turn] for turn in range(most) for queue in queues if turn < len(queue)]
    return turns[:most]


def choose_siblings(batch: Batch) -> tuple[Response, ...]:
    """The best and the worst paid response of the first group that was paid unequally, else of the first group."""
    groups = list(_by_problem(batch).values())
    for group in groups:
        best, worst = (choose(group, key=lambda response: response.reward) for choose in (max, min))
        if best.reward != worst.reward:
            return best, worst
    return tuple(groups[0][:2]) if groups else ()


def _by_problem(batch: Batch) -> dict[str, list[Response]]:
    groups: dict[str, list[Response]] = {}
    for response in batch.responses:
        groups.setdefault(response.id, []).append(response)
    return groups
