"""Microbatches of packed rows: cut by a budget of tokens, scored, and differentiated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veritune.core.errors import ConfigError, TrainingError
from veritune.losses import selected_log_probs
from veritune.model.head import response_log_probs
from veritune.model.packing import PackedRows, pack_rows, siblings_of
from veritune.model.policy import Policy, attends_to_all


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch, packed into one sequence without padding, each prompt once."""

    rows: list[int]
    """Which rows of the batch these are, in the order in which they are packed."""
    packed: PackedRows
    response_mask: Tensor  # (B, T), True at the first `length` positions of each row's response, T the longest


def cut_microbatches(
    prompts_ids: Sequence[Sequence[int]],
    responses_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    token_budget: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Cut `rows` into microbatches of at most `token_budget` positions, rows with the same prompt side by side.

    A prompt counts once in each microbatch that holds some of its responses; a row longer than the budget stands alone.
    The longest comes first, so that the memory its pass leaves behind has room for the others, and each is packed when
    it is asked for, so that memory does not grow with the batch.
    """
    groups: list[list[int]] = []
    room: list[int] = []  # what is left of the budget in each
    for prompt, members in siblings_of(rows, prompts_ids).items():
        joined = False  # whether the present microbatch holds the prompt
        for row in members:
            inputs = max(len(responses_ids[row]) - 1, 0)
            needed = inputs if joined else inputs + len(prompt)
            if not groups or needed > room[-1]:
                groups.append([])
                room.append(token_budget)
                needed = inputs + len(prompt)
            groups[-1].append(row)
            room[-1] -= needed
            joined = True
    for place in sorted(range(len(groups)), key=room.__getitem__):
        yield _pack(prompts_ids, responses_ids, groups[place], device)


def _pack(
    prompts_ids: Sequence[Sequence[int]], responses_ids: Sequence[Sequence[int]], rows: list[int], device: torch.device
) -> Microbatch:
    responses = [responses_ids[row] for row in rows]
    lengths = list(map(len, responses))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Microbatch(rows, pack_rows([prompts_ids[row] for row in rows], responses, device), mask.to(device))


def score_responses(model: Any, microbatch: Microbatch, temperature: float) -> Tensor:
    """`response_log_probs` without a gradient, (R,)."""
    with torch.no_grad():
        return response_log_probs(model, microbatch.packed, temperature)


def finite_backward(loss: Tensor) -> float:
    """Add the gradient of a loss, (), to the parameters'; returns the loss.

    TrainingError, before anything is added, if it is not finite.
    """
    value = loss.item()
    if not math.isfinite(value):
        raise TrainingError(f"the loss is {value}")
    loss.backward()  # type: ignore[no-untyped-call]
    return value


def prove_packing(policy: Policy, name: str) -> None:
    """ConfigError unless the packed path gives log-probabilities that the model's own forward pass gives.

    It does not where the attention is of another kind, or the model does something to its logits after the head.
    """
    if not attends_to_all(policy.model.config):
        raise ConfigError(f"policy {name!r} has attention layers that are not full; only full attention can be trained")
    prompts, responses = [[1, 2, 3], [1, 2, 3], [4, 5]], [[6, 7, 8, 9], [5], [3, 2, 1]]
    (microbatch,) = cut_microbatches(
        prompts, responses, range(3), token_budget=100, device=next(policy.model.parameters()).device
    )
    try:
        packed = score_responses(policy.model, microbatch, temperature=1.0)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"policy {name!r} cannot be trained: packed rows do not go through it ({reason})") from error
    alone = [_score_alone(policy.model, prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    difference = (packed - torch.cat(alone)).abs().max().item()
    allowed = 1e-3 if packed.dtype == policy.model.dtype else 0.5
    if not difference <= allowed:
        raise ConfigError(
            f"policy {name!r} cannot be trained: log-probabilities of packed rows are {difference:.2g} nats away from "
            f"those of its own forward pass (at most {allowed} is rounding), so it attends or ends in another way"
        )


@torch.no_grad()
def _score_alone(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """log p of each response token by the model's own forward pass over one row, (length,)."""
    ids = torch.tensor([[*prompt, *response]], device=next(model.parameters()).device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return selected_log_probs(logits, ids[0, len(prompt) :])


def supervised_backward(model: Any, microbatch: Microbatch, response_tokens: int) -> float:
    """Add the gradient of the negative log-likelihood of the response tokens, divided by how many the batch has."""
    return finite_backward(-response_log_probs(model, microbatch.packed, 1.0).sum() / response_tokens)


def supervised_rank_backward(
    policy: Policy, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], response_tokens: int, token_budget: int
) -> float:
    """Add the gradient of these pairs of a batch with `response_tokens` to the parameters'; returns their loss."""
    microbatches = cut_microbatches(
        [prompt for prompt, _ in pairs],
        [response for _, response in pairs],
        range(len(pairs)),
        token_budget=token_budget,
        device=next(policy.model.parameters()).device,
    )
    return sum(supervised_backward(policy.model, microbatch, response_tokens) for microbatch in microbatches)


def pad_responses(values: Tensor, response_mask: Tensor) -> Tensor:
    """One value for each response token, (R,) row by row, laid out as `response_mask` (B, T), zero elsewhere."""
    padded = torch.zeros(response_mask.shape, dtype=values.dtype, device=values.device)
    return padded.masked_scatter(response_mask, values)
