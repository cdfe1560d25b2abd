"""Synthetic reasoning traces for Countdown with three numbers: what the embedded policy is pretrained on.

A trace tries one pair of numbers after another. Each line writes the first step, the number that is left, and then
what that number makes of the first result, each beside the target, until one equals it:

    18-5=13 9 +22|4 -4|4 yes
    </think> <answer> (18-5)-9 </answer>

Repeating the target beside each result makes the verdict learnable for a very small model. A careful trace searches
until it finds; a careless one gives up after most failed lines and answers wrongly, or overlooks a hit. A policy that
has learned from careful traces first and careless ones last knows its arithmetic and can search, but seldom does,
which leaves something for reinforcement learning to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LARGEST_PRODUCT = 100
"""A second step's product above this is not written: no target is that large."""


@dataclass(frozen=True)
class TraceHabits:
    """How imperfect the written reasoning is. Each is a probability."""

    give_up: float
    """Answering with the last try after a line that failed, in a trace that is not persistent."""
    persistent: float
    """Being a trace that never gives up."""
    overlook: float
    """Not noticing a result that equals the target."""
    misjudge: float
    """Taking a result for the target that is not."""


CAREFUL = TraceHabits(give_up=0.0, persistent=1.0, overlook=0.0, misjudge=0.0)
CARELESS = TraceHabits(give_up=0.8, persistent=0.1, overlook=0.1, misjudge=0.01)


@dataclass(frozen=True, slots=True)
class Trace:
    """A response to a Countdown prompt, from after `<think>\\n` to `</answer>`, and whether its answer is right."""

    response: str
    correct: bool


def write_trace(numbers: Sequence[int], target: int, generator: random.Random, habits: TraceHabits) -> Trace:
    """One trace for three `numbers` and a `target`, with all choices drawn from `generator`."""
    first_steps = list(_first_steps(numbers))
    generator.shuffle(first_steps)
    persistent = generator.random() < habits.persistent
    lines: list[str] = []
    answer, value = "", 0
    for expression, result, left in first_steps:
        line = f"{expression}={result} {left}"
        verdict = " no"
        for operator, value in _results(result, left):
            line += f" {operator}{value}|{target}"
            answer = _answer(expression, result, operator, left)
            noticed = generator.random() >= habits.overlook if value == target else generator.random() < habits.misjudge
            if noticed:
                verdict = " yes"
                break
        lines.append(line + verdict)
        if verdict == " yes" or (not persistent and generator.random() < habits.give_up):
            break
    return Trace("\n".join(lines) + f"\n</think> <answer> {answer} </answer>", value == target)


def _first_steps(numbers: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Every distinct (expression, its result, the number left over) of two of three numbers, in integers from 0 up."""
    seen = set()
    for first, second, left in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        low, high = sorted((numbers[first], numbers[second]))
        pairs = {"+": (numbers[first], numbers[second]), "-": (high, low), "*": (numbers[first], numbers[second])}
        if low and high % low == 0:
            pairs["/"] = (high, low)
        for operator, (a, b) in pairs.items():
            step = (f"{a}{operator}{b}", _apply(operator, a, b), numbers[left])
            if step not in seen:
                seen.add(step)
                yield step


def _results(result: int, left: int) -> Iterator[tuple[str, int]]:
    """What the second step can make, always in this order; a subtraction and a division take the larger one first."""
    low, high = sorted((result, left))
    yield "+", result + left
    yield "-", high - low
    if result * left <= LARGEST_PRODUCT:
        yield "*", result * left
    if low and high % low == 0:
        yield "/", high // low


def _apply(operator: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator] if operator != "/" else a // b


def _answer(expression: str, result: int, operator: str, left: int) -> str:
    if operator in "-/" and result < left:
        return f"{left}{operator}({expression})"
    return f"({expression}){operator}{left}"
