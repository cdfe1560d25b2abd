"""RMSNorm and SwiGLU that keep for their backward pass only what it cannot do without.

Autograd keeps seven matrices of them: a norm's input in float32, normalised, and times the weight; a SwiGLU's gate,
SiLU of it, up, and their product. Here it is four, and the others are computed again from them, element by element: in
one pass over them on a CPU, by `cpu_kernels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veritune import cpu_kernels
from veritune.decode import is_of_family


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, as transformers' Llama and Qwen round it.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. Keeps x (..., H) and one number a row.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if cpu_kernels.serve(hidden):
            normed, scale = cpu_kernels.rms_norm(hidden, weight, epsilon)
            context.save_for_backward(hidden, weight, scale)
            return normed
        scale = hidden.float().square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        context.save_for_backward(hidden, weight, scale)
        return (hidden.float() * scale).to(hidden.dtype) * weight

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight, scale = context.saved_tensors
        if cpu_kernels.serve(hidden):
            return *cpu_kernels.rms_norm_backward(slope, hidden, weight, scale), None
        normed = hidden.float() * scale
        weight_gradient = (slope * normed.to(slope.dtype)).flatten(0, -2).sum(dim=0)
        inner = (slope * weight).float()
        along = torch.linalg.vecdot(inner, normed)[..., None] / hidden.shape[-1]
        return inner.addcmul_(normed, along, value=-1).mul_(scale).to(hidden.dtype), weight_gradient, None


class SwiGLU(torch.autograd.Function):
    """(silu(gate) * up) @ down.T, Shazeer 2020, https://arxiv.org/abs/2002.05202. Keeps gate and up, (..., F) each.

    Out of torch's kernels, its gradients are autograd's own bit for bit: the same kernels on the same numbers.
    """

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        context.save_for_backward(gate, up, down)
        product = cpu_kernels.swiglu(gate, up) if cpu_kernels.serve(gate) else functional.silu(gate).mul_(up)
        return functional.linear(product, down)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        gate, up, down = context.saved_tensors
        if cpu_kernels.serve(gate):
            down_gradient = slope.flatten(0, -2).mT @ cpu_kernels.swiglu(gate, up).flatten(0, -2)
            return *cpu_kernels.swiglu_backward(slope @ down, gate, up), down_gradient
        silu = functional.silu(gate)
        down_gradient = slope.flatten(0, -2).mT @ (silu * up).flatten(0, -2)
        inner = slope @ down
        up_gradient = silu.mul_(inner)
        inner.mul_(up)
        gate_gradient = torch.ops.aten.silu_backward.grad_input(inner, gate, grad_input=inner)
        return gate_gradient, up_gradient, down_gradient


@contextlib.contextmanager
def lean_layers(model: Any) -> Iterator[None]:
    """Have the norms and MLPs of a model of `decode.FAMILY` compute as above; any other model stays as it is.

    An MLP stays too where its matrices are not plain ones, as with adapters on them.
    """
    changed = []
    if is_of_family(model.config):
        for module in model.modules():
            if (forward := _lean_forward(module)) is not None:
                module.forward = forward
                changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _lean_forward(module: Any) -> Any:
    if type(module).__name__.endswith("RMSNorm"):
        return lambda hidden: RMSNorm.apply(hidden, module.weight, module.variance_epsilon)
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if all(type(linear) is torch.nn.Linear for linear in (gate, up, down)) and down.bias is None:  # type: ignore[union-attr]
        return lambda hidden: SwiGLU.apply(gate(hidden), up(hidden), down.weight)  # type: ignore[misc, union-attr]
    return None
