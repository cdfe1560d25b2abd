"""The one place where a parameter's gradient is written: everything else returns gradients to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """float32, or `dtype` where that is longer."""
    return torch.promote_types(dtype, torch.float32)


def make_gradients(model: torch.nn.Module) -> None:
    """Give every trained parameter without a gradient one of zeros.

    Made before the first forward pass, gradients lie together; made in the backward pass, they would fill the gaps
    between the activations and leave the memory in pieces.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def add_gradient(parameter: Tensor, add: Callable[[Tensor], Any]) -> Tensor | None:
    """In a backward pass, have `add(total)` add to the gradient of a matrix as large as the vocabulary.

    Where the parameter has a gradient, the addition happens there and autograd gets None, so that no second matrix is
    made, not even where head and embedding are one; hooks on the parameter do not see it. Otherwise autograd gets the
    sum. `total` is float32 or better: many small addends would be lost in a shorter type.
    """
    gradient, full = parameter.grad, full_precision(parameter.dtype)
    if gradient is not None and gradient.dtype == full:
        add(gradient)
        return None
    total = torch.zeros_like(parameter, dtype=full)
    add(total)
    if gradient is None:
        return total.to(parameter.dtype)
    gradient.add_(total)
    return None


class Embedding(torch.autograd.Function):
    """weight[ids], (N, E) for ids (N,); the row of `padding_id` gets no gradient, as in torch.nn.Embedding."""

    @staticmethod
    def forward(context: Any, weight: Tensor, ids: Tensor, padding_id: int | None) -> Tensor:
        context.padding_id = padding_id
        context.save_for_backward(weight, ids)
        return weight[ids]

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        weight, ids = context.saved_tensors
        if context.padding_id is not None:
            grad_output = grad_output.masked_fill((ids == context.padding_id)[:, None], 0)
        return add_gradient(weight, lambda total: total.index_add_(0, ids, grad_output.to(total.dtype))), None, None
