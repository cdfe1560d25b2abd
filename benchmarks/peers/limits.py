"""The counted limit of R, T and S: operations over this machine's matrix rate, bytes over its copy rate.

python limits.py FOLDER reads the recorded rollouts there and writes limits.json: the seconds that one thread needs for
each shape if every product runs at the rate of the same product measured alone, and nothing else takes any time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import POLICY, SHAPES, Shape

HIDDEN, LAYERS = int(POLICY["hidden_size"]), int(POLICY["num_hidden_layers"])
MATRICES = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, int(POLICY["intermediate_size"]))] * 3
"""Inputs and outputs of one layer's products; the third of the feed-forward network has them the other way round."""
LAYER_OPERATIONS = sum(2 * inputs * outputs for inputs, outputs in MATRICES)
HEAD_OPERATIONS = 2 * HIDDEN * int(POLICY["vocab_size"])
ATTENTION_OPERATIONS = 4 * HIDDEN
"""For each query and key of a layer: a product for the score and one for the value."""
PARAMETERS = LAYERS * LAYER_OPERATIONS // 2 + HEAD_OPERATIONS // 2


def best_seconds(function: Callable[[], Any], trials: int = 20) -> float:
    function()
    seconds = []
    for _ in range(trials):
        began = time.process_time_ns()
        for _ in range(8):
            function()
        seconds.append((time.process_time_ns() - began) / 8e9)
    return min(seconds)


def matrix_rate(rows: int, *, backward: bool) -> float:
    """Operations a second of one layer's products for `rows` tokens, with their backward products if asked for."""
    seconds = operations = 0.0
    for inputs, outputs in sorted(set(MATRICES)):
        times = MATRICES.count((inputs, outputs))
        tokens, weight = torch.randn(rows, inputs), torch.randn(inputs, outputs)
        slopes = torch.randn(rows, outputs)
        products = [lambda a=tokens, b=weight: a @ b]
        if backward:
            products += [lambda a=slopes, b=weight: a @ b.T, lambda a=tokens, b=slopes: a.T @ b]
        seconds += times * sum(map(best_seconds, products))
        operations += times * len(products) * 2 * rows * inputs * outputs
    return operations / seconds


def copy_rate() -> float:
    """Bytes read and written a second, far beyond the caches."""
    source = torch.randn(32 << 20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), trials=3)


def counts_of(rows: list[dict[str, Any]], shape: Shape) -> dict[str, float]:
    """Tokens that must pass, and pairs of query and key, with each prompt once; the last sampled token need not."""
    prompts = [len(row["prompt"]) for row in rows[:: shape.siblings]]
    responses = [(len(row["prompt"]), len(row["response"])) for row in rows]
    return {
        "prompt_tokens": sum(prompts),
        "prompt_pairs": sum(length * (length + 1) / 2 for length in prompts),
        "fed_tokens": sum(length - 1 for _, length in responses),
        "fed_pairs": sum((length - 1) * prompt + length * (length - 1) / 2 for prompt, length in responses),
        "sampled_tokens": sum(length for _, length in responses),
        "steps": max(length for _, length in responses) - 1,
    }


def operations_of(tokens: float, pairs: float, scored: float) -> float:
    return LAYERS * (tokens * LAYER_OPERATIONS + pairs * ATTENTION_OPERATIONS) + scored * HEAD_OPERATIONS


def limit_of(shape: Shape, counts: dict[str, float], rates: dict[str, float]) -> dict[str, float]:
    """Seconds of rollout, training step and both; decoding waits for the slower of products and bytes."""
    prefill = operations_of(counts["prompt_tokens"], counts["prompt_pairs"], shape.prompts) / rates["prefill"]
    decode = operations_of(counts["fed_tokens"], counts["fed_pairs"], counts["sampled_tokens"]) / rates["decode"]
    read = 4 * (counts["steps"] * PARAMETERS + 2 * LAYERS * HIDDEN * counts["fed_pairs"]) / rates["copy"]
    tokens, pairs = counts["prompt_tokens"] + counts["fed_tokens"], counts["prompt_pairs"] + counts["fed_pairs"]
    passes = 3 * operations_of(tokens, pairs, counts["sampled_tokens"]) / rates["train_rate"]
    update = 4 * 7 * PARAMETERS / rates["copy"]  # weight, gradient and two moments read, all but the gradient written
    rollout, train = prefill + max(decode, read), passes + update
    return {"rollout": rollout, "train": train, "whole": rollout + train, "tokens": counts["sampled_tokens"]}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    rates = {
        "copy": copy_rate(),
        "prefill": matrix_rate(1024, backward=False),
        "train_rate": matrix_rate(2048, backward=True),
    }
    limits = {}
    for shape in SHAPES.values():
        recorded = folder / f"rollouts-{shape.name}.json"
        if recorded.exists():
            rates["decode"] = matrix_rate(shape.rows, backward=False)
            limits[shape.name] = limit_of(shape, counts_of(json.loads(recorded.read_text()), shape), rates) | rates
    (folder / "limits.json").write_text(json.dumps(limits, indent=1) + "\n")


if __name__ == "__main__":
    main()
