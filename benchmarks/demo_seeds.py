"""Hold the demonstration's promise against its runs: python benchmarks/demo_seeds.py RUN...

Held-out accuracy before and after for each run, the mean with Student's 95% interval over the runs, and exit code 1
where the mean falls short of 70% or a start lies outside 10% to 35%.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from veritune.core.run_folder import RunFolder
from veritune.core.statistics import mean_estimate

PROMISED, LOWEST_START, HIGHEST_START = 0.70, 0.10, 0.35


def main() -> int:
    before, after = [], []
    for path in map(Path, sys.argv[1:]):
        rows = [row for row in RunFolder.open(path).metrics() if "validation_accuracy" in row]
        before.append(rows[0]["validation_accuracy"])
        after.append(rows[-1]["validation_accuracy"])
        low, high = rows[-1]["validation_accuracy_low"], rows[-1]["validation_accuracy_high"]
        minutes = rows[-1]["seconds_elapsed"] / 60
        print(f"{path.name}: {before[-1]:.1%} -> {after[-1]:.1%} [{low:.1%}, {high:.1%}] in {minutes:.1f} minutes")
    mean = mean_estimate(after, (0.0, 1.0))
    low, high = mean.interval
    print(f"mean: {fmean(before):.1%} -> {mean.value:.1%}, 95% interval over runs [{low:.1%}, {high:.1%}]")
    kept = mean.value >= PROMISED and all(LOWEST_START <= start <= HIGHEST_START for start in before)
    print(
        "as promised"
        if kept
        else f"NOT as promised: at least {PROMISED:.0%} from {LOWEST_START:.0%}-{HIGHEST_START:.0%}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
