"""Which responses a report shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from veritune.report.collect import Batch, Response, Run

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which could steer a terminal; marks that reorder text; halves of surrogate pairs."""


@dataclass(frozen=True)
class Pair:
    """Responses to the same held-out problem before and after training."""

    before: Response
    after: Response

    @property
    def outcome(self) -> tuple[bool, bool]:
        return self.before.correct, self.after.correct


def visible(text: str) -> str:
    """Model text with everything but printable characters, tabs and line ends replaced by U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def pair_up(run: Run) -> list[Pair]:
    """The problems that the first and the last validation both asked, in the file's order."""
    if run.before is None or run.after is None:
        return []
    after: dict[str, Response] = {}
    for response in run.after.responses:
        after.setdefault(response.id, response)
    firsts: dict[str, Response] = {}
    for response in run.before.responses:
        firsts.setdefault(response.id, response)
    return [Pair(response, after[key]) for key, response in firsts.items() if key in after]


def outcome_counts(pairs: Sequence[Pair]) -> dict[tuple[bool, bool], int]:
    """How many problems were solved (before, after)."""
    keys = [(before, after) for before in (False, True) for after in (False, True)]
    return {key: sum(pair.outcome == key for pair in pairs) for key in keys}


def choose_pairs(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """The first pairs of each outcome in turn: learned, not learned, kept, unlearned."""
    queues = [
        [pair for pair in pairs if pair.outcome == outcome]
        for outcome in ((False, True), (False, False), (True, True), (True, False))
    ]
    turns = [queue[turn] for turn in range(most) for queue in queues if turn < len(queue)]
    return turns[:most]


def choose_siblings(batch: Batch) -> tuple[Response, ...]:
    """The best and the worst paid response of the first group that was paid unequally, else of the first group."""
    groups: dict[str, list[Response]] = {}
    for response in batch.responses:
        groups.setdefault(response.id, []).append(response)
    if not groups:
        return ()
    telling = next((g for g in groups.values() if len({response.reward for response in g}) > 1), None)
    group = telling or next(iter(groups.values()))
    if telling is None:
        return tuple(group[:2])
    return max(group, key=lambda response: response.reward), min(group, key=lambda response: response.reward)
