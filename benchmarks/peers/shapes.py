"""What all sides are given: the shapes, their prompts, and one policy of random weights. Standard library alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 128
EOS_IDS = (0, 1, 2, 3)
"""Four of 128 near-equally likely ids end a response: its length is geometric with a mean of 32."""


@dataclass(frozen=True)
class Shape:
    """P prompts with G responses each, of `min_tokens` to `max_tokens` tokens."""

    name: str
    prompts: int
    siblings: int
    max_tokens: int
    min_tokens: int = 0
    shortest_prompt: int = 36
    longest_prompt: int = 44

    @property
    def rows(self) -> int:
        return self.prompts * self.siblings


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("A", 8, 8, 64, 64),
        Shape("B-short", 8, 8, 128),
        Shape("D", 32, 8, 128, 128),
        Shape("D-short", 32, 8, 128),
    )
}

POLICY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 616,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""A Qwen2 of 2.04M parameters, as transformers' configuration has it."""


def text_of(ids: Sequence[int]) -> str:
    """The benchmarks' tokenizer has one id for each character of ASCII, and that is its number."""
    return "".join(map(chr, ids))


def prompts_of(shape: Shape, seed: int = 0) -> list[list[int]]:
    """P prompts of random printable characters."""
    draw = random.Random(seed)
    lengths = [draw.randint(shape.shortest_prompt, shape.longest_prompt) for _ in range(shape.prompts)]
    return [[draw.randint(ord("!"), ord("~")) for _ in range(length)] for length in lengths]


def reward_of(text: str) -> float:
    """0 or 1, each about as often, so that nearly every group has both; it costs next to nothing."""
    return float(sum(map(ord, text)) % 2)


def drawn_rollouts(shape: Shape, seed: int = 0) -> list[dict[str, Any]]:
    """Rollouts that nobody sampled, each of `max_tokens` random ids: what a measurement of cost alone needs."""
    draw = random.Random(seed)
    return [
        {
            "prompt": prompt,
            "response": [draw.randint(ord("!"), ord("~")) for _ in range(shape.max_tokens)],
            "logprobs": [0.0] * shape.max_tokens,
            "reward": float(sibling % 2),
        }
        for prompt in prompts_of(shape)
        for sibling in range(shape.siblings)
    ]
