"""Log-probabilities of response tokens, and their gradient, without the logits of a whole batch.

Logits are made a chunk of tokens at a time, so that memory does not grow with tokens times vocabulary. Where one chunk
holds all of them, the backward pass finds their gradient in their place; otherwise it makes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veritune.model.decoder_layer import as_method, packed_hidden_states
from veritune.model.gradients import add_gradient, full_precision
from veritune.model.packing import PackedRows

CHUNK_LOGITS = {"cpu": 18 << 20, "cuda": 1 << 27}
"""Logits that a chunk holds, in float32: 72 MiB on a CPU, 512 MiB on a GPU. On a CPU, those are the logits of a
microbatch of 576 tokens over 32k ids."""


def response_log_probs(model: Any, packed: PackedRows, temperature: float) -> Tensor:
    """log p of each response token under softmax(logits / temperature), (R,) row by row, in float32 or better.

    The whole forward pass of a model that `as_policy` has wrapped, in one call that autograd differentiates.
    """
    result: Tensor = as_method(model, packed_log_probs)(packed, temperature)
    return result


def packed_log_probs(model: Any, packed: PackedRows, temperature: float) -> Tensor:
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return label_log_probs(packed_hidden_states(model, packed), head.weight, bias, packed.labels, temperature)


def label_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float) -> Tensor:
    """log softmax((hidden @ weight.T + bias) / temperature) at the labels: (R, E) and (R,) to (R,)."""
    result: Tensor = LabelLogProbs.apply(hidden, weight, bias, labels, temperature, torch.is_grad_enabled())
    return result


class LabelLogProbs(torch.autograd.Function):
    """`label_log_probs`; with `differentiate` off, nothing is kept for a backward pass."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        differentiate: bool,
    ) -> Tensor:
        log_probs, grad_logits = torch.empty_like(labels, dtype=full_precision(hidden.dtype)), None
        for part, log_softmax, memory in _log_softmax_chunks(hidden, weight, bias, temperature):
            log_probs[part] = log_softmax.gather(-1, labels[part, None])[:, 0]
            if differentiate and len(log_softmax) == len(labels):
                grad_logits = _grad_logits(log_softmax, memory, labels)
            del log_softmax  # before the next chunk is made
        context.temperature = temperature
        context.save_for_backward(hidden, weight, bias, labels, grad_logits)
        return log_probs

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, labels, kept = context.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = context.needs_input_grad
        # A token's factor goes to the side of the products that has no column for every id.
        factor = (grad_output / -context.temperature)[:, None]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=full_precision(bias.dtype)) if needs_bias else None

        def chunks() -> Iterator[tuple[slice, Tensor]]:
            if kept is not None:
                yield slice(len(labels)), kept
                return
            for part, log_softmax, memory in _log_softmax_chunks(hidden, weight, bias, context.temperature):
                yield part, _grad_logits(log_softmax, memory, labels[part])

        def add(grad_weight: Tensor | None) -> None:
            for part, grad_logits in chunks():
                if grad_hidden is not None:
                    torch.mm(grad_logits, weight, out=grad_hidden[part]).mul_(factor[part])
                if grad_bias is not None:
                    grad_bias.add_((factor[part].T.to(grad_logits.dtype) @ grad_logits)[0])
                if grad_weight is None:
                    continue
                weighted = (hidden[part] * factor[part]).to(hidden.dtype)
                if grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.T, weighted)
                else:
                    grad_weight += grad_logits.T @ weighted

        grad_weight = None
        if needs_weight:
            grad_weight = add_gradient(weight, add)
        else:
            add(None)
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None


def _grad_logits(log_softmax: Tensor, memory: Tensor, labels: Tensor) -> Tensor:
    """softmax - one hot of the label, in `memory`: the gradient of -log p by the logits, (r, V) in hidden's type.

    At the label it is p - 1, rounded to that type once: where the policy is sure, p alone would round to 1.
    """
    at_labels = torch.arange(len(labels), device=labels.device), labels
    minus_one = torch.expm1(log_softmax[at_labels])
    torch.exp(log_softmax, out=memory)
    memory[at_labels] = minus_one.to(memory.dtype)
    return memory


def _log_softmax_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's place among the tokens, its log-softmax, (r, V) in float32 or better, and memory for its gradient.

    The memory, (r, V) in hidden's type, is where the logits were: in float32 it is the log-softmax's own. All chunks
    use the same, so that a chunk is good until the next.
    """
    tokens, full = len(hidden), full_precision(hidden.dtype)
    size = max(1, CHUNK_LOGITS["cuda" if hidden.is_cuda else "cpu"] // len(weight))
    buffer = hidden.new_empty(min(size, tokens), len(weight))
    for start in range(0, tokens, size):
        part = slice(start, min(start + size, tokens))
        memory = buffer[: part.stop - start]
        logits = torch.mm(hidden[part], weight.T, out=memory)
        if bias is not None:
            logits += bias
        if temperature != 1:
            logits = logits.to(full).div_(temperature)
        # A row is read to its end before it is written, so that the result may take the place of the logits.
        yield part, torch.log_softmax(logits, dim=-1, dtype=full, out=logits if logits.dtype == full else None), memory
