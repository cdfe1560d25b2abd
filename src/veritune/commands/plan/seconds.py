"""The least time that the counted work of a GRPO step takes.

Floating-point operations over the matrix rate or bytes over the copy rate, whichever is longer, for matrix products
and attention apart, since one waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from veritune.commands.plan.config import PlanConfig
from veritune.commands.plan.devices import Device
from veritune.commands.plan.shapes import Shape


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the stages of one step."""

    prefill: float
    decode: float
    reference: float
    train: float
    update: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.reference + self.train + self.update


@dataclass(frozen=True)
class Work:
    """What the rates of one device make of counted work."""

    device: Device
    dtype: torch.dtype

    def seconds(self, operations: float, moved: float = 0.0) -> float:
        """The longer of floating-point operations over the matrix rate and bytes over the copy rate."""
        return max(operations / self.device.matrix_rate(self.dtype), moved / self.device.copy)


def survival(mean: float, longest: int) -> Tensor:
    """The share of responses that have more than t tokens, for t = 0, 1, … (longest,); it sums to `mean`.

    Any token but the last possible one ends a response with the same probability: a geometric distribution cut off at
    `longest`, the one which assumes nothing but the two numbers.
    """
    steps = torch.arange(longest, dtype=torch.float64)
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle**steps).sum()) < mean else (low, middle)
    return high**steps


def step_seconds(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype, *, places: int) -> StepSeconds:
    """Seconds of one step, with at most `places` responses side by side in each engine."""
    work, alive = Work(device, dtype), survival(config.mean_response, config.max_tokens)
    rows, groups = config.rollout_batch_size, config.rollout_batch_size // config.group_size
    servers, split = config.engines
    prefill = prefill_seconds(shape, work, -(-groups // servers), config.prompt_tokens) / split
    # vLLM reads a prompt for each of its responses.
    siblings = config.group_size if config.sampler == "native" else 1
    decode = decode_seconds(shape, work, -(-rows // servers), siblings, places, config.prompt_tokens, alive) / split
    forward, forward_layers = forward_operations(shape, config, alive)
    again = forward_layers if config.activation_checkpointing else 0.0
    weights = shape.parameters * dtype.itemsize
    return StepSeconds(
        prefill=prefill,
        decode=decode,
        reference=work.seconds(forward) if config.kl_coefficient else 0.0,
        train=work.seconds(3 * forward + again),
        # The gradient is read for its norm and scaled; AdamW reads four tensors and writes three.
        update=work.seconds(0, 10 * weights),
    )


def prefill_seconds(shape: Shape, work: Work, prompts: int, length: int) -> float:
    """Seconds of one pass over all prompts, with logits at their ends alone."""
    operations = 2 * prompts * (length * shape.layer_matrices + shape.head_matrix)
    pairs = prompts * length * (length + 1) / 2
    weights = (shape.layer_matrices + shape.head_matrix) * work.dtype.itemsize
    return work.seconds(operations, weights) + work.seconds(4 * shape.layers * shape.query * pairs)


def decode_seconds(
    shape: Shape, work: Work, rows: int, siblings: int, places: int, prompt: int, alive: Tensor
) -> float:
    """Seconds of every decode step of `rows` responses, `places` of them side by side as long as others wait.

    A step reads every weight once, the cache of what each row that is alive has generated, and a prompt once for all of
    its `siblings` that are alive. `alive` is from `survival`; the first token of a response comes from the prefill.
    """
    matrices, size = shape.layer_matrices + shape.head_matrix, work.dtype.itemsize

    def matrix_seconds(live: float) -> float:
        # Less than one row that is expected alive is a step that is perhaps not taken.
        return work.seconds(2 * matrices * live, min(live, 1.0) * matrices * size)

    later, abreast = alive[1:], min(rows, places)
    drained = sum(matrix_seconds(abreast * share) for share in later.tolist())
    full_steps = (rows - abreast) / abreast * float(later.sum())
    own = rows * float((later * torch.arange(1, len(alive))).sum())
    scored = own + rows * prompt * float(later.sum())
    groups_alive = rows / siblings * float((1 - (1 - later) ** siblings).sum())
    read = own + prompt * groups_alive
    attention = work.seconds(4 * shape.layers * shape.query * scored, shape.cache_bytes(size) * read)
    return drained + full_steps * matrix_seconds(abreast) + attention


def forward_operations(shape: Shape, config: PlanConfig, alive: Tensor) -> tuple[float, float]:
    """Floating-point operations of scoring every response, all in all and without the head.

    The head is applied to response positions alone.
    """
    rows, passes = config.rollout_batch_size, prompt_passes(config)
    prompt, responses = config.prompt_tokens, rows * float(alive.sum())
    tokens = passes * prompt + responses
    pairs = passes * prompt * (prompt + 1) / 2
    pairs += rows * float((alive * (prompt + 1 + torch.arange(len(alive)))).sum())
    layers = 2 * tokens * shape.layer_matrices + 4 * shape.layers * shape.query * pairs
    return layers + 2 * responses * shape.head_matrix, layers


def prompt_passes(config: PlanConfig) -> int:
    """How often a prompt is computed in a step's training: once for each microbatch with some of its responses.

    Responses of mean length fill the microbatches one after the other, as `microbatches.cut_microbatches` has them do.
    """
    passes, room = 0, 0.0
    for _ in range(config.rollout_batch_size // config.group_size):
        joined = False  # whether the present microbatch holds the prompt
        for _ in range(config.group_size):
            needed = config.mean_response - 1 + (0 if joined else config.prompt_tokens)
            if needed > room:
                room, joined = config.microbatch_tokens, False
                needed = config.mean_response - 1 + config.prompt_tokens
            passes, room, joined = passes + (not joined), room - needed, True
    return passes
