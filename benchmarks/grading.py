"""How fast the graders are on one core: grades per second, median and 99th percentile, with and without the pool.

Run: PYTHONPATH=src python benchmarks/grading.py [--cases tests/grading/cases.jsonl] [--rounds 3]

No gold answer is cached between grades. The times are CPU seconds of the grading thread, so that other programs on
the machine don't count; the pool's rate is by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from veritune.grading import GradingPool, is_equivalent, question_only_reward_fn, r1_zero_reward_fn

THOUGHT = "We add the parts, check the sum against the question, and simplify. " * 12


def load(path: Path) -> list[tuple[str, object, bool]]:
    """The labelled benign cases as (answer, gold, right)."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["answer"], row["gold"], row["right"]) for row in rows if row["family"] != "hostile"]


def report(name: str, seconds: list[float], correct: int) -> None:
    """One line of figures from the seconds that each grade took."""
    ordered = sorted(seconds)
    print(
        f"{name:<28}{len(ordered) / sum(ordered):>10,.0f} grades/s"
        f"   p50 {1e6 * statistics.median(ordered):6.0f} us   p99 {1e6 * ordered[int(0.99 * len(ordered))]:6.0f} us"
        f"   max {1e3 * ordered[-1]:6.2f} ms   right {correct}/{len(ordered)}"
    )


def main() -> None:
    """Print one line for each way to grade."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, default=Path(__file__).parents[1] / "tests/grading/cases.jsonl")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cases = load(arguments.cases) * arguments.rounds
    is_equivalent(r"\sqrt{12}", r"2\sqrt{3}")  # imports mpmath, once for each process
    ways = {
        "is_equivalent": is_equivalent,
        "r1_zero_reward_fn": lambda answer, gold: r1_zero_reward_fn(
            f"{THOUGHT}</think> <answer>{answer}</answer>", gold
        )["reward"],
        "question_only_reward_fn": lambda answer, gold: question_only_reward_fn(f"{THOUGHT}\\boxed{{{answer}}}.", gold)[
            "reward"
        ],
    }
    for name, grade in ways.items():
        seconds, correct = [], 0
        for answer, gold, right in cases:
            started = time.thread_time()
            outcome = grade(answer, gold)
            seconds.append(time.thread_time() - started)
            correct += bool(outcome) is right
        report(name, seconds, correct)
    pairs = [(f"{THOUGHT}</think> <answer>{answer}</answer>", gold) for answer, gold, _ in cases]
    with GradingPool() as pool:
        pool.score(pairs[:256])
        started = time.perf_counter()
        scores = pool.score(pairs)
        elapsed = time.perf_counter() - started
    correct = sum(bool(score.reward) is right for score, (_, _, right) in zip(scores, cases, strict=True))
    print(f"{'GradingPool (by the clock)':<28}{len(pairs) / elapsed:>10,.0f} grades/s   right {correct}/{len(pairs)}")


if __name__ == "__main__":
    main()
