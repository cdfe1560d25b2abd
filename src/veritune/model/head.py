"""Log-probabilities of response tokens, and the gradient of their loss, without the logits of a whole batch.

Logits are made a chunk of tokens at a time. Where a gradient is wanted it is taken from the same chunk, before the next
one is made, so that memory does not grow with tokens times vocabulary, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits that a chunk holds, in float32: 64 MiB on a CPU, 512 MiB on a GPU."""

TokenLoss = Callable[[Tensor, slice], Tensor]
"""The loss of each token of a chunk, (r,), from its log-probabilities (r,) and its place among all R tokens."""


@dataclass(frozen=True)
class HeadPass:
    """What one pass through the head leaves."""

    loss: Tensor  # ()
    log_probs: Tensor  # (R,), without a gradient
    hidden_gradient: Tensor  # (R, H)


@torch.no_grad()
def score_tokens(hidden: Tensor, head: Any, labels: Tensor, temperature: float) -> Tensor:
    """log softmax(head(hidden) / temperature) at the labels: (R, H) and (R,) to (R,), in float32 or better."""
    scores = torch.empty_like(labels, dtype=_full(hidden.dtype))
    for part, log_softmax, _ in _log_softmax_chunks(hidden, head, len(labels), temperature):
        scores[part] = _at_labels(log_softmax, labels[part])
        del log_softmax  # before the next chunk is made
    return scores


@torch.no_grad()
def score_and_differentiate(
    hidden: Tensor, head: Any, labels: Tensor, temperature: float, token_loss: TokenLoss
) -> HeadPass:
    """The sum of `token_loss` over R tokens and its gradients: hidden's is returned, the head's added to its own.

    `hidden` (R, H), `labels` (R,). A token's loss may depend on its own log-probability only.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    weight_gradient, bias_gradient = (_accumulator(parameter) for parameter in (weight, bias))
    hidden_gradient, scores = torch.empty_like(hidden), torch.empty_like(labels, dtype=_full(hidden.dtype))
    loss = scores.new_zeros(())
    for part, log_softmax, residual in _log_softmax_chunks(hidden, head, len(labels), temperature):
        with torch.enable_grad():
            leaf = _at_labels(log_softmax, labels[part]).requires_grad_()
            chunk_loss = token_loss(leaf, part).sum()
            (slope,) = torch.autograd.grad(chunk_loss, leaf)
        loss += chunk_loss.detach()
        scores[part] = leaf.detach()
        # d log p(label) / d logits = -residual / temperature, where residual = softmax - one hot of label. At the label
        # that is p - 1, rounded to the weights' type once: where the policy is sure, p alone would round to 1. What a
        # token's residual is multiplied with goes to the side of the products that has no column for every id.
        torch.exp(log_softmax, out=residual)
        at_labels = torch.arange(len(leaf), device=leaf.device), labels[part]
        residual[at_labels] = torch.expm1(scores[part]).to(residual.dtype)
        del log_softmax  # memory of its own where the weights' type is shorter
        slope = (slope / -temperature)[:, None]
        torch.mm(residual, weight, out=hidden_gradient[part]).mul_(slope)
        if weight_gradient is not None:
            weighed = (hidden[part] * slope).to(hidden.dtype)
            if weight_gradient.dtype == residual.dtype:
                weight_gradient.addmm_(residual.T, weighed)
            else:
                weight_gradient += residual.T @ weighed
        if bias_gradient is not None:
            bias_gradient += (slope.T.to(residual.dtype) @ residual)[0]
    _give_back(weight, weight_gradient)
    _give_back(bias, bias_gradient)
    return HeadPass(loss, scores, hidden_gradient)


def _full(dtype: torch.dtype) -> torch.dtype:
    """float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def _accumulator(parameter: Any) -> Tensor | None:
    """What a trained parameter's gradient is added to: its own, or a sum of enough bits for many small addends."""
    if parameter is None or not parameter.requires_grad:
        return None
    if parameter.grad is not None and parameter.dtype == _full(parameter.dtype):
        return parameter.grad
    return torch.zeros_like(parameter, dtype=_full(parameter.dtype))


def _give_back(parameter: Any, gradient: Tensor | None) -> None:
    """Have the parameter's gradient contain what was added to its accumulator."""
    if gradient is not None and gradient is not parameter.grad:
        parameter.grad = gradient.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(gradient)


def _at_labels(log_softmax: Tensor, labels: Tensor) -> Tensor:
    return log_softmax.gather(-1, labels[:, None])[:, 0]


def _log_softmax_chunks(
    hidden: Tensor, head: Any, tokens: int, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's place among the tokens, its log-softmax, (r, V) in float32 or better, and room for its gradient.

    The room, (r, V) in hidden's type, is where the logits were: in float32 it is the log-softmax's own memory. Chunks
    lie there one after the other, so that what is yielded is good until the next.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    full = _full(hidden.dtype)
    size = max(1, CHUNK_LOGITS["cuda" if hidden.is_cuda else "cpu"] // len(weight))
    buffer = hidden.new_empty(min(size, tokens), len(weight))
    for start in range(0, tokens, size):
        part = slice(start, min(start + size, tokens))
        room = buffer[: part.stop - start]
        logits = torch.mm(hidden[part], weight.T, out=room)
        if bias is not None:
            logits += bias
        if temperature != 1:
            logits = logits.to(full).div_(temperature)
        # A row is read to its end before it is written, so that the result may take the place of the logits.
        yield part, torch.log_softmax(logits, dim=-1, dtype=full, out=logits if logits.dtype == full else None), room
