"""What holds the embedded policy back: what searching Countdown can reach, and how often runs repeat a line.

    python benchmarks/countdown_search.py RUN …

Two searchers write flawless lines as in the policy's own traces: one draws every line anew, the other never repeats
one. RUNs are run folders of any recipe; their last validation is read.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from veritune.core.run_folder import RunFolder
from veritune.model.policy import load_policy
from veritune.recipes.config import GRPOConfig
from veritune.tasks import load_task
from veritune.tasks.countdown_traces import CAREFUL, TraceHabits, write_trace

ONE_LINE = TraceHabits(give_up=1.0, persistent=0.0, overlook=0.0, misjudge=0.0)
DRAWS = 4
"""Searches of each problem."""
END = "\n</think>"


def main() -> None:
    config = GRPOConfig()
    task, policy = load_task(config), load_policy(config.policy)
    problems = [example.ground_truth for example in task.examples("validation")[: config.validation_examples]]
    print(f"solved of {len(problems)} problems, searched {DRAWS} times each: every line drawn anew, or none twice")
    lengths = []
    for repeats in (True, False):
        generator = random.Random(0)
        found = (
            search(problem["numbers"], problem["target"], generator, repeats)
            for problem in problems
            for _ in range(DRAWS)
        )
        lengths.append([len(policy.encode(response)) for response in found])
    for limit in (320, 400, 480):
        anew, never_twice = (sum(length <= limit for length in each) / len(each) for each in lengths)
        print(f"  within {limit} tokens: {anew:.1%}, {never_twice:.1%}")
    for run in map(Path, sys.argv[1:]):
        folder = RunFolder.open(run)
        rows = folder.read_rows("validation", max(folder.steps("validation")))
        shares = ", ".join(f"{share:.0%}" for share in repeated_lines([row["response"] for row in rows]))
        print(f"{run}: lines 1, 2, … that repeat an earlier one: {shares}")


def search(numbers: list[int], target: int, generator: random.Random, repeats: bool) -> str:
    """A response that searches until it finds."""
    if not repeats:
        return write_trace(numbers, target, generator, CAREFUL).response
    failed = ""
    while not (trace := write_trace(numbers, target, generator, ONE_LINE)).correct:
        failed += trace.response.split(END)[0] + "\n"
    return failed + trace.response


def repeated_lines(responses: list[str]) -> list[float]:
    """The share of the first, second, … lines whose first step stands in an earlier line; of ten places."""
    repeated, total = Counter[int](), Counter[int]()
    for response in responses:
        seen: set[str] = set()
        for place, line in enumerate(response.split(END)[0].strip().split("\n")[:10]):
            step = line.split("=")[0]
            total[place] += 1
            repeated[place] += step in seen
            seen.add(step)
    return [repeated[place] / total[place] for place in sorted(total)]


if __name__ == "__main__":
    main()
