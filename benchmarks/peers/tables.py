"""The tables of ratios from a folder of runs, as markdown: python tables.py FOLDER. Standard library alone."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PARTS = {"R": "rollout", "T": "train", "S": "whole"}
TITLES = {
    "R": "Rollouts",
    "T": "Training step on recorded rollouts, after equal loss and gradient norm",
    "S": "Whole step: rollout, reward, update",
}
BARS = (
    ("R", "D-short", "TRL generate", 5.0),
    ("R", "D-short", "vLLM", 1.7),
    ("R", "A", "TRL generate", 1.5),
    ("R", "D", "TRL generate", 1.5),
    ("R", "A", "vLLM", 1.3),
    ("R", "D", "vLLM", 1.3),
    ("T", "D-short", "TRL", 3.5),
    ("T", "A", "TRL", 1.3),
    ("T", "D", "TRL", 1.3),
    ("S", "D-short", "TRL", 4.0),
    ("S", "B-short", "TRL", 3.0),
    ("S", "A", "TRL", 1.35),
    ("S", "D", "TRL", 1.35),
)
"""How many times as fast as a side ours is to be, in CPU-seconds."""
MOST_OF_PEAK, MOST_OF_LIMIT, MOST_GROWTH = 0.5, 2.5, 1.05
PLAIN, LARGE_VOCABULARY = "plain logits", 32_000


class Runs:
    """All runs of a folder, warm-ups apart, by kind, shape and side."""

    def __init__(self, folder: Path) -> None:
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        self.rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in sorted((row for row in found if "round" in row), key=lambda row: row["round"]):
            self.rows.setdefault((row["kind"], row["shape"], row["side"]), []).append(row)
        limits = folder / "limits.json"
        self.limits: dict[str, Row] = json.loads(limits.read_text()) if limits.exists() else {}

    def of(self, kind: str, shape: str, side: str = "veritune") -> list[Row]:
        """The runs after the warm-up; the warm-up itself where that is all there is."""
        rows = self.rows.get((kind, shape, side), [])
        return [row for row in rows if row["round"]] or rows

    def keys(self, kind: str) -> list[tuple[str, str]]:
        return [(shape, side) for found, shape, side in self.rows if found == kind]

    def cost(self, kind: str, row: Row, clock: str = "cpu") -> float:
        """Seconds for a kept token: sides that sample for themselves do not sample equally many."""
        return row[PARTS[kind]][clock] / row["tokens"]

    def ratios(self, kind: str, shape: str, side: str, clock: str = "cpu") -> list[float]:
        """How many times as long as ours `side` takes, round by round."""
        ours = {row["round"]: self.cost(kind, row, clock) for row in self.of(kind, shape)}
        theirs = self.of(kind, shape, side)
        return [self.cost(kind, row, clock) / ours[row["round"]] for row in theirs if row["round"] in ours]

    def peak(self, kind: str, shape: str, side: str = "veritune") -> float:
        return max((row["peak_mib"] for row in self.of(kind, shape, side)), default=0.0)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the lowest and highest in brackets."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(f"\n**{title}**\n")
        for row in (head, ["---"] * len(head), *rows):
            print("| " + " | ".join(row) + " |")


def comparison(runs: Runs, kind: str) -> None:
    """One line a shape and side: seconds, kept tokens, ratio to ours, peak memory, multiple of the counted limit."""
    part, lines = PARTS[kind], []
    for shape, side in sorted(runs.keys(kind), key=lambda key: (key[0], key[1] != "veritune", key[1])):
        rows = runs.of(kind, shape, side)
        limit = runs.limits.get(shape)
        multiple = "–"
        if limit:
            best = limit[part] / limit["tokens"]
            multiple = f"{statistics.median(runs.cost(kind, row) for row in rows) / best:.1f}"
        lines.append(
            [
                shape,
                side + (f" ({rows[0]['microbatch']} rows)" if side == "TRL" and "microbatch" in rows[0] else ""),
                spread([row[part]["cpu"] for row in rows]),
                spread([row[part]["wall"] for row in rows]),
                spread([row["tokens"] / row[part]["cpu"] for row in rows], 0),
                spread(runs.ratios(kind, shape, side)) if side != "veritune" else "1",
                f"{runs.peak(kind, shape, side):,.0f}" if kind != "R" else "–",
                multiple,
            ]
        )
    head = ["shape", "side", "CPU-s", "wall s", "kept tokens / CPU-s", "times ours", "peak MiB", "times the limit"]
    print_table(TITLES[kind], head, lines)


def limits_table(runs: Runs) -> None:
    head = ["shape", "rollout s", "training s", "whole s", "decode GFLOP/s", "training GFLOP/s", "copy GB/s"]
    lines = [
        [shape]
        + [f"{limit[name]:.2f}" for name in ("rollout", "train", "whole")]
        + [f"{limit[name] / 1e9:.0f}" for name in ("decode", "train_rate", "copy")]
        for shape, limit in runs.limits.items()
    ]
    print_table("Counted limit", head, lines)


# --- Growth --------------------------------------------------------------------------------------------------------


def fastest(runs: Runs, kind: str, shape: str, side: str = "veritune") -> float:
    return min(row["train"]["cpu"] for row in runs.of(kind, shape, side))


def names_of(runs: Runs, kind: str) -> list[str]:
    """The shapes of a kind, in the order of the numbers in their names."""
    return sorted({shape for shape, _ in runs.keys(kind)}, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def prompt_costs(runs: Runs) -> dict[str, tuple[float, float, float]]:
    """CPU-seconds of the step with long and with short prompts, and by how much they differ, for each number of
    siblings: medians over the rounds."""
    costs = {}
    for name in dict.fromkeys(name.split()[0] for name in names_of(runs, "growth-prompts")):
        rounds = [
            [row["train"]["cpu"] for row in runs.of("growth-prompts", f"{name} {length}")]
            for length in ("long", "short")
        ]
        differences = [long - short for long, short in zip(*rounds, strict=True)]
        costs[name] = (*map(statistics.median, rounds), statistics.median(differences))
    return costs


def growth_peaks(runs: Runs) -> dict[str, float]:
    """MiB at the end of each process, its highest: the median over the processes."""
    peaks = {}
    for name in names_of(runs, "growth-peak"):
        ends = [row["peak_mib"] for row in runs.of("growth-peak", name) if row["round"] % 2 == 0]
        peaks[name] = statistics.median(ends)
    return peaks


def head_peak(runs: Runs, shape: str, side: str = "veritune") -> float:
    """MiB above imports and weights, the gradients taken off: they are as large as the weights."""
    return runs.peak("head", shape, side) - runs.of("head", shape, side)[-1]["gradients_mib"]


def growth(runs: Runs) -> None:
    """The four tables of growth."""
    lines = [[name, *(f"{value:.2f}" for value in values)] for name, values in prompt_costs(runs).items()]
    head = ["siblings", "step with prompts of 128 tokens, CPU-s", "of 8", "difference: the prompts"]
    print_table("Prompts in a training step: 32 groups of 64 response tokens that are read, medians", head, lines)

    lines = [[name, f"{peak:.1f}"] for name, peak in growth_peaks(runs).items()]
    title = "Peak memory of a training step, responses of 64 tokens, medians of fresh processes"
    print_table(title, ["rollouts, siblings", "MiB"], lines)

    lines = []
    for name in names_of(runs, "growth-length"):
        rates = [row["tokens"] / row["train"]["cpu"] for row in runs.of("growth-length", name)]
        lines.append([name, spread(rates, 0)])
    head = ["length", "response tokens / CPU-s"]
    print_table("Length of responses, 8,192 response tokens a step", head, lines)

    lines = []
    for name in names_of(runs, "head"):
        ours, plain = (fastest(runs, "head", name, side) for side in ("veritune", PLAIN))
        norms = [runs.of("head", name, side)[-1]["grad_norm"] for side in ("veritune", PLAIN)]
        peaks = [head_peak(runs, name, side) for side in ("veritune", PLAIN)]
        lines.append([name, f"{ours:.2f}", f"{plain:.2f}", *(f"{peak:.0f}" for peak in peaks)])
        lines[-1].append(f"{norms[0] / norms[1] - 1:+.0e}")
    head = ["vocabulary", "ours, CPU-s", "plain logits", "ours, peak MiB", "plain logits", "gradient norms differ by"]
    print_table("The head: gradient of 2 × 512 tokens, hidden 256, one layer; peak without the gradients", head, lines)


# --- Bars ----------------------------------------------------------------------------------------------------------


def bars(runs: Runs) -> None:
    """What was promised, and whether it holds."""
    lines = []

    def add(name: str, value: float, sign: str, bar: float) -> None:
        holds = value <= bar if sign == "≤" else value >= bar
        lines.append([name, f"{value:.2f}", f"{sign} {bar:g}", "holds" if holds else "**falls short**"])

    for kind, shape, side, bar in BARS:
        if ratios := runs.ratios(kind, shape, side):
            add(f"{kind} {shape}: {side} / ours, CPU-s", statistics.median(ratios), "≥", bar)
    for shape in ("D-short", "B-short", "A", "D"):
        if theirs := runs.peak("S", shape, "TRL"):
            add(f"S {shape}: peak, ours / TRL", runs.peak("S", shape) / theirs, "≤", MOST_OF_PEAK)
    for shape, limit in runs.limits.items():
        if rows := runs.of("S", shape):
            cost = statistics.median(runs.cost("S", row) for row in rows) * limit["tokens"]
            add(f"S {shape}: ours / counted limit", cost / limit["whole"], "≤", MOST_OF_LIMIT)
    if costs := [difference for *_, difference in prompt_costs(runs).values()]:
        add("prompts' cost, most / least over siblings", max(costs) / min(costs), "≤", MOST_GROWTH)
    if peaks := list(growth_peaks(runs).values()):
        add("peak, most / least over siblings and rollouts", max(peaks) / min(peaks), "≤", MOST_GROWTH)
    names = names_of(runs, "head")
    for name in (name for name in names if int(name[2:]) >= LARGE_VOCABULARY):
        seconds = fastest(runs, "head", name, PLAIN) / fastest(runs, "head", name)
        add(f"head {name}: plain logits / ours, CPU-s", seconds, "≥", 1)
        add(f"head {name}: peak, ours / plain logits", head_peak(runs, name) / head_peak(runs, name, PLAIN), "≤", 1)
    for smallest in (0, LARGE_VOCABULARY):  # below it, all logits together are less than a chunk of them
        if beyond := [head_peak(runs, name) for name in names if int(name[2:]) >= smallest]:
            which = f"of {smallest} and more" if smallest else "of all sizes"
            add(f"head: peak, most / least over vocabularies {which}", max(beyond) / min(beyond), "≤", MOST_GROWTH)
    print_table("Bars", ["what", "measured", "bar", ""], lines)


def print_tables(folder: Path) -> None:
    runs = Runs(folder)
    for kind in PARTS:
        comparison(runs, kind)
    limits_table(runs)
    growth(runs)
    bars(runs)


if __name__ == "__main__":
    print_tables(Path(sys.argv[1]))
