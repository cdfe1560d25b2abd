"""The layers of a model over a packed sequence: for training, for scoring, and for the prompts of a rollout.

Models of an `architectures.FAMILY` run the two blocks below, forwards and backwards; any other model runs its own
layers with our attention. A block keeps for its backward pass its input, the input and the output of attention, and the
gate and the up of a SwiGLU. The rest is computed again, element by element. So a layer keeps about half of what
autograd does, and its passes make few tensors that are soon given back. A weight that is not trained costs no product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from veritune.model.architectures import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    has_packed_layers,
    rotary_of,
    weights_of,
)
from veritune.model.gradients import Embedding
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.packing import PackedRows, Packing, Segment, attention_backward, attention_forward


class Surroundings(NamedTuple):
    """What all layers of one pass over N tokens share."""

    packing: Packing
    cosine: Tensor  # (N, D)
    sine: Tensor  # (N, D), negative in its first half
    epsilon: float


def packed_hidden_states(model: Any, packed: PackedRows) -> Tensor:
    """The last hidden state that predicts each response token, (R, E), of a model that `as_policy` has wrapped."""
    embedding = model.get_input_embeddings()
    if not has_packed_layers(model):
        own = type(embedding) is torch.nn.Embedding
        output = model.base_model(
            input_ids=None if own else packed.input_ids,
            inputs_embeds=_embed(embedding, packed.input_ids[0])[None] if own else None,
            position_ids=packed.position_ids,
            attention_mask=packed.input_ids.new_empty(1, 1, 1, 1),  # of four dimensions, so that none is made
            packing=packed.packing,
            use_cache=False,
        )
        return output.last_hidden_state[0].index_select(0, packed.predictors)
    hidden = _embed(embedding, packed.input_ids[0])
    surroundings = _surroundings(model, hidden, packed.position_ids, packed.packing)
    for layer in model.base_model.layers:
        hidden = as_method(layer, packed_layer)(hidden, surroundings)
    return RMSNorm.apply(hidden.index_select(0, packed.predictors), model.base_model.norm.weight, surroundings.epsilon)


def as_method(module: torch.nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a module and more: the module's method of the same name where it has one.

    FSDP2 gathers the weights of a module around a method that was given to `register_fsdp_forward_method`.
    """
    return getattr(module, function.__name__, None) or partial(function, module)


def packed_layer(layer: Any, hidden: Tensor, surroundings: Surroundings) -> Tensor:
    """Hidden states (N, E) after a model's decoder layer."""
    _, attention, mlp = weights_of(layer)

    def blocks(hidden: Tensor) -> Tensor:
        result: Tensor = MLPBlock.apply(
            AttentionBlock.apply(hidden, surroundings, *attention), surroundings.epsilon, *mlp
        )
        return result

    if layer.training and layer.gradient_checkpointing:
        return checkpoint(blocks, hidden, use_reentrant=False, preserve_rng_state=False)
    return blocks(hidden)


def prefill(
    model: Any, layers: Sequence[LayerWeights], prompts_ids: Sequence[Sequence[int]]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """P prompts as one packed sequence, without a gradient.

    Returns the last hidden state of each one's last token (P, E), and of every layer keys and values, (P, K, T, D)
    each for T tokens of the longest prompt, zero beyond the end of a shorter one.
    """
    device = model.base_model.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts_ids])
    ends = lengths.cumsum(0)
    segments = tuple(
        Segment(end - len(prompt), len(prompt)) for end, prompt in zip(ends.tolist(), prompts_ids, strict=True)
    )
    positions = torch.arange(int(lengths.max()))
    written = (positions < lengths[:, None]).to(device)
    input_ids = torch.tensor([token for prompt in prompts_ids for token in prompt], device=device)
    position_ids = positions.to(device).expand_as(written)[written]
    hidden = _embed(model.get_input_embeddings(), input_ids)
    surroundings = _surroundings(model, hidden, position_ids[None], Packing(segments, device))
    stored = []
    for layer in layers:
        hidden, kept = attend(hidden, surroundings, layer.attention)
        stored.append((_apart(kept.key, written), _apart(kept.value, written)))
        del kept  # what is here for a backward pass alone
        hidden = feed_forward(hidden, surroundings.epsilon, layer.mlp)[0]
    last = hidden[ends.to(device) - 1]
    return rms_norm(last, model.base_model.norm.weight, surroundings.epsilon), stored


def _apart(vectors: Tensor, written: Tensor) -> Tensor:
    """(N, K, D) of prompts end to end to (P, K, T, D), where `written` (P, T) is True N times."""
    padded = vectors.new_zeros(*written.shape, *vectors.shape[1:])
    padded[written] = vectors
    return padded.transpose(1, 2)


def _embed(embedding: Any, ids: Tensor) -> Tensor:
    """(N, E) of ids (N,)"""
    result: Tensor = Embedding.apply(embedding.weight, ids, embedding.padding_idx)
    return result


def _surroundings(model: Any, hidden: Tensor, position_ids: Tensor, packing: Packing) -> Surroundings:
    """Of hidden states (N, E) and their positions (1, N)."""
    cosine, sine = rotary_of(model, hidden[None], position_ids)
    return Surroundings(packing, cosine[0].contiguous(), sine[0], model.config.rms_norm_eps)


# --- Attention ---------------------------------------------------------------------------------------------------


class KeptByAttention(NamedTuple):
    """What its backward pass needs beside its input, weights and surroundings."""

    query: Tensor  # (N, H, D), rotated
    key: Tensor  # (N, K, D), rotated
    value: Tensor  # (N, K, D)
    attention_output: Tensor  # (N, H, D)
    logsumexp: Tensor  # (H, N)
    query_before_norm: Tensor | None  # (N, H, D), where queries and keys are normed
    key_before_norm: Tensor | None  # (N, K, D)


def attend(hidden: Tensor, surroundings: Surroundings, weights: AttentionWeights) -> tuple[Tensor, KeptByAttention]:
    """hidden + attention(RMSNorm(hidden)), (N, E)."""
    packing, cosine, sine, epsilon = surroundings
    size = cosine.shape[-1]
    states = rms_norm(hidden, weights.norm, epsilon)
    query, key, value = (
        functional.linear(states, matrix, bias).unflatten(-1, (-1, size))
        for matrix, bias in (
            (weights.query, weights.query_bias),
            (weights.key, weights.key_bias),
            (weights.value, weights.value_bias),
        )
    )
    query_before_norm = key_before_norm = None
    if weights.query_norm is not None and weights.key_norm is not None:
        query_before_norm, key_before_norm = query, key
        query = rms_norm(query, weights.query_norm, epsilon)
        key = rms_norm(key, weights.key_norm, epsilon)
    query, key = rotate_(query, cosine, sine), rotate_(key, cosine, sine)
    attention_output, logsumexp = attention_forward(query, key, value, packing, size**-0.5)
    result = torch.addmm(hidden, attention_output.flatten(1), weights.o_proj.T)
    return result, KeptByAttention(query, key, value, attention_output, logsumexp, query_before_norm, key_before_norm)


class AttentionBlock(torch.autograd.Function):
    """`attend`, of hidden states (N, E), surroundings, and the fields of `AttentionWeights`."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, surroundings: Surroundings, *weights: Any) -> Tensor:
        result, kept = attend(hidden, surroundings, AttentionWeights(*weights))
        context.surroundings = surroundings
        context.save_for_backward(hidden, *kept, *weights)
        return result

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, *saved = context.saved_tensors
        kept = KeptByAttention(*saved[: len(KeptByAttention._fields)])
        weights = AttentionWeights(*saved[len(KeptByAttention._fields) :])
        packing, cosine, sine, epsilon = context.surroundings
        needs = AttentionWeights(*context.needs_input_grad[2:])
        grad_o_proj = grad_output.T @ kept.attention_output.flatten(1) if needs.o_proj else None
        grad_query, grad_key, grad_value = attention_backward(
            (grad_output @ weights.o_proj).view_as(kept.attention_output),
            *(kept.query, kept.key, kept.value, kept.attention_output, kept.logsumexp),
            packing,
            cosine.shape[-1] ** -0.5,
        )
        # A rotation's gradient is rotated back: both halves of cosine and sine are the same.
        grad_query, grad_key = rotate_(grad_query, cosine, -sine), rotate_(grad_key, cosine, -sine)
        grad_query_norm = grad_key_norm = None
        if weights.query_norm is not None and weights.key_norm is not None:
            assert kept.query_before_norm is not None and kept.key_before_norm is not None
            grad_query, grad_query_norm = rms_norm_backward(
                grad_query, kept.query_before_norm, weights.query_norm, epsilon
            )
            grad_key, grad_key_norm = rms_norm_backward(grad_key, kept.key_before_norm, weights.key_norm, epsilon)
        grad_query, grad_key, grad_value = grad_query.flatten(1), grad_key.flatten(1), grad_value.flatten(1)
        states = rms_norm(hidden, weights.norm, epsilon)
        grad_qkv = [
            gradient
            for grad_result, needs_weight, needs_bias in (
                (grad_query, needs.query, needs.query_bias),
                (grad_key, needs.key, needs.key_bias),
                (grad_value, needs.value, needs.value_bias),
            )
            for gradient in (
                grad_result.T @ states if needs_weight else None,
                grad_result.sum(dim=0) if needs_bias else None,
            )
        ]
        del states
        grad_states = (grad_query @ weights.query).addmm_(grad_key, weights.key).addmm_(grad_value, weights.value)
        grad_hidden, grad_norm = rms_norm_backward(grad_states, hidden, weights.norm, epsilon)
        return grad_hidden.add_(grad_output), None, grad_norm, *grad_qkv, grad_query_norm, grad_key_norm, grad_o_proj


def rotate_(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions of vectors (N, heads, D), which may be overwritten. Su et al. 2021, arXiv 2104.09864.

    The halves are exchanged, and the first changes its sign: `sine` (N, D) is negative in its first half.
    """
    if cpu_kernels.serve(vectors):
        cpu_kernels.rotate_(vectors, cosine, sine)
        return vectors
    return torch.addcmul(vectors * cosine[:, None], vectors.roll(vectors.shape[-1] // 2, dims=-1), sine[:, None])


# --- SwiGLU ------------------------------------------------------------------------------------------------------


def feed_forward(hidden: Tensor, epsilon: float, weights: MLPWeights) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """hidden + (silu(gate) * up) @ down.T, (N, E), with gate and up, (N, F) each, of RMSNorm(hidden).

    Shazeer 2020, arXiv 2002.05202.
    """
    states = rms_norm(hidden, weights.norm, epsilon)
    gate, up = states @ weights.gate.T, states @ weights.up.T
    del states
    return torch.addmm(hidden, swiglu(gate, up), weights.down.T), (gate, up)


class MLPBlock(torch.autograd.Function):
    """The result of `feed_forward`, of hidden states (N, E), epsilon, and the fields of `MLPWeights`."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, epsilon: float, *weights: Tensor) -> Tensor:
        result, kept = feed_forward(hidden, epsilon, MLPWeights(*weights))
        context.epsilon = epsilon
        context.save_for_backward(hidden, *kept, *weights)
        return result

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, gate, up, *saved = context.saved_tensors
        weights = MLPWeights(*saved)
        needs = MLPWeights(*context.needs_input_grad[2:])
        grad_down = grad_output.T @ swiglu(gate, up) if needs.down else None
        grad_gate, grad_up = swiglu_backward(grad_output @ weights.down, gate, up)
        states = rms_norm(hidden, weights.norm, context.epsilon)
        grad_matrices = (
            grad_gate.T @ states if needs.gate else None,
            grad_up.T @ states if needs.up else None,
        )
        del states
        grad_states = (grad_gate @ weights.gate).addmm_(grad_up, weights.up)
        del grad_gate, grad_up
        grad_hidden, grad_norm = rms_norm_backward(grad_states, hidden, weights.norm, context.epsilon)
        return grad_hidden.add_(grad_output), None, grad_norm, *grad_matrices, grad_down


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (N, F)."""
    return cpu_kernels.swiglu(gate, up) if cpu_kernels.serve(gate) else functional.silu(gate).mul_(up)


def swiglu_backward(grad_output: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up; all three tensors may be overwritten."""
    if cpu_kernels.serve(gate):
        cpu_kernels.swiglu_backward_(grad_output, gate, up)
        # They were kept for this pass: a second one would be refused.
        torch.autograd.graph.increment_version((gate, up))
        return gate, up
    grad_up = functional.silu(gate).mul_(grad_output)
    grad_output.mul_(up)
    return torch.ops.aten.silu_backward.grad_input(grad_output, gate, grad_input=grad_output), grad_up


# --- RMSNorm -----------------------------------------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of (..., E), which keeps its input alone."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        context.epsilon = epsilon
        context.save_for_backward(hidden, weight)
        return rms_norm(hidden, weight, epsilon)

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight = context.saved_tensors
        return *rms_norm_backward(grad_output, hidden, weight, context.epsilon), None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, as transformers' Llama and Qwen round it.

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if cpu_kernels.serve(hidden):
        return cpu_kernels.rms_norm(hidden, weight, epsilon)
    full = _full(hidden)
    return (full * _scale(full, epsilon)).to(hidden.dtype) * weight


def rms_norm_backward(grad_output: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gradients by `hidden` and by `weight`, from the gradient by what was normed."""
    if cpu_kernels.serve(hidden):
        return cpu_kernels.rms_norm_backward(grad_output, hidden, weight, epsilon)
    full = _full(hidden)
    scale = _scale(full, epsilon)
    normed = full * scale
    grad_weight = (grad_output * normed.to(grad_output.dtype)).flatten(0, -2).sum(dim=0)
    inner = (grad_output * weight).to(full.dtype)
    along = torch.linalg.vecdot(inner, normed)[..., None] / hidden.shape[-1]
    return inner.addcmul_(normed, along, value=-1).mul_(scale).to(hidden.dtype), grad_weight


def _full(hidden: Tensor) -> Tensor:
    """In float32 or better."""
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def _scale(full: Tensor, epsilon: float) -> Tensor:
    return full.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
