"""The layers of a model over a packed sequence: for training, for scoring, and for the prompts of a rollout.

Models of a `families.FAMILY` run the two blocks below, forwards and backwards; any other model runs its own layers
with our attention. A block keeps for its backward pass only what it cannot do without: its input, what goes into
attention and comes out of it, and the gate and the up of a SwiGLU. The rest is computed again, element by element. So a
layer keeps about half of what autograd does, and its passes make few tensors that are soon given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from veritune.model.architectures import AttentionWeights, LayerWeights, MLPWeights, layers_of, rotary_of
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
    layers = layers_of(model)
    if layers is None:
        output = model.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=packed.input_ids.new_empty(1, 1, 1, 1),  # of four dimensions, so that none is made
            packing=packed.packing,
            use_cache=False,
        )
        return output.last_hidden_state[0].index_select(0, packed.predictors)
    hidden, surroundings = _embed(model, packed.input_ids, packed.position_ids, packed.packing)
    keeps_inputs_alone = model.training and model.base_model.layers[0].gradient_checkpointing
    for layer in layers:
        if keeps_inputs_alone:
            hidden = checkpoint(_layer, hidden, surroundings, layer, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = _layer(hidden, surroundings, layer)
    return RMSNorm.apply(hidden.index_select(0, packed.predictors), model.base_model.norm.weight, surroundings.epsilon)


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
    places = torch.arange(int(lengths.max()))
    written = (places < lengths[:, None]).to(device)
    input_ids = torch.tensor([token for prompt in prompts_ids for token in prompt], device=device)
    position_ids = places.to(device).expand_as(written)[written]
    hidden, surroundings = _embed(model, input_ids[None], position_ids[None], Packing(segments, device))
    stored = []
    for layer in layers:
        hidden, kept = attend(hidden, surroundings, layer.attention)
        stored.append((_apart(kept.key, written), _apart(kept.value, written)))
        del kept  # what is here for a backward pass alone
        hidden = feed_forward(hidden, surroundings.epsilon, layer.mlp)[0]
    last = hidden[ends.to(device) - 1]
    return rms_norm(last, model.base_model.norm.weight, surroundings.epsilon), stored


def _apart(vectors: Tensor, written: Tensor) -> Tensor:
    """(N, K, D) of prompts end to end to (P, K, T, D), where `written` (P, T) has N places."""
    padded = vectors.new_zeros(*written.shape, *vectors.shape[1:])
    padded[written] = vectors
    return padded.transpose(1, 2)


def _embed(model: Any, input_ids: Tensor, position_ids: Tensor, packing: Packing) -> tuple[Tensor, Surroundings]:
    """Hidden states (N, E) before the first layer, of ids and positions (1, N)."""
    hidden = model.base_model.embed_tokens(input_ids)
    cosine, sine = rotary_of(model, hidden, position_ids)
    return hidden[0], Surroundings(packing, cosine[0].contiguous(), sine[0], model.config.rms_norm_eps)


def _layer(hidden: Tensor, surroundings: Surroundings, layer: LayerWeights) -> Tensor:
    hidden = AttentionBlock.apply(hidden, surroundings, *layer.attention)
    result: Tensor = MLPBlock.apply(hidden, surroundings.epsilon, *layer.mlp)
    return result


# --- Attention ---------------------------------------------------------------------------------------------------


class KeptByAttention(NamedTuple):
    """What its backward pass needs beside its input, weights and surroundings."""

    query: Tensor  # (N, H, D), rotated
    key: Tensor  # (N, K, D), rotated
    value: Tensor  # (N, K, D)
    mixed: Tensor  # (N, H, D)
    logsumexp: Tensor  # (H, N)
    plain_query: Tensor | None  # (N, H, D) and (N, K, D), before they are normed: where they are
    plain_key: Tensor | None


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
    plain_query = plain_key = None
    if weights.query_norm is not None and weights.key_norm is not None:
        plain_query, plain_key = query, key
        query = rms_norm(query, weights.query_norm, epsilon)
        key = rms_norm(key, weights.key_norm, epsilon)
    query, key = rotate_(query, cosine, sine), rotate_(key, cosine, sine)
    mixed, logsumexp = attention_forward(query, key, value, packing, size**-0.5)
    result = torch.addmm(hidden, mixed.flatten(1), weights.outwards.T)
    return result, KeptByAttention(query, key, value, mixed, logsumexp, plain_query, plain_key)


class AttentionBlock(torch.autograd.Function):
    """`attend`, of hidden states (N, E), surroundings, and the fields of `AttentionWeights`."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, surroundings: Surroundings, *weights: Any) -> Tensor:
        result, kept = attend(hidden, surroundings, AttentionWeights(*weights))
        context.surroundings = surroundings
        context.save_for_backward(hidden, *kept, *weights)
        return result

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, *saved = context.saved_tensors
        kept = KeptByAttention(*saved[: len(KeptByAttention._fields)])
        weights = AttentionWeights(*saved[len(KeptByAttention._fields) :])
        packing, cosine, sine, epsilon = context.surroundings
        of_outwards = slope.T @ kept.mixed.flatten(1)
        of_mixed = (slope @ weights.outwards).view_as(kept.mixed)
        by_attention = (kept.query, kept.key, kept.value, kept.mixed, kept.logsumexp, packing)
        of_query, of_key, of_value = attention_backward(of_mixed, *by_attention, cosine.shape[-1] ** -0.5)
        del of_mixed
        # A rotation's gradient is turned back by it: halves of cosine and sine are the same.
        of_query, of_key = rotate_(of_query, cosine, -sine), rotate_(of_key, cosine, -sine)
        of_query_norm = of_key_norm = None
        if weights.query_norm is not None and weights.key_norm is not None:
            assert kept.plain_query is not None and kept.plain_key is not None
            of_query, of_query_norm = rms_norm_backward(of_query, kept.plain_query, weights.query_norm, epsilon)
            of_key, of_key_norm = rms_norm_backward(of_key, kept.plain_key, weights.key_norm, epsilon)
        of_query, of_key, of_value = of_query.flatten(1), of_key.flatten(1), of_value.flatten(1)
        states = rms_norm(hidden, weights.norm, epsilon)
        of_inwards = [
            gradient
            for by_output, bias in (
                (of_query, weights.query_bias),
                (of_key, weights.key_bias),
                (of_value, weights.value_bias),
            )
            for gradient in (by_output.T @ states, None if bias is None else by_output.sum(dim=0))
        ]
        del states
        of_states = (of_query @ weights.query).addmm_(of_key, weights.key).addmm_(of_value, weights.value)
        of_hidden, of_norm = rms_norm_backward(of_states, hidden, weights.norm, epsilon)
        return of_hidden.add_(slope), None, of_norm, *of_inwards, of_query_norm, of_key_norm, of_outwards


def rotate_(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions of vectors (N, heads, D), which may be overwritten. Su et al. 2021, arXiv 2104.09864.

    Halves change places, and the first its sign: `sine` (N, D) is negative in its first half.
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
    def backward(context: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, gate, up, *saved = context.saved_tensors
        weights = MLPWeights(*saved)
        of_down = slope.T @ swiglu(gate, up)
        of_gate, of_up = swiglu_backward(slope @ weights.down, gate, up)
        states = rms_norm(hidden, weights.norm, context.epsilon)
        of_matrices = of_gate.T @ states, of_up.T @ states
        del states
        of_states = (of_gate @ weights.gate).addmm_(of_up, weights.up)
        del of_gate, of_up
        of_hidden, of_norm = rms_norm_backward(of_states, hidden, weights.norm, context.epsilon)
        return of_hidden.add_(slope), None, of_norm, *of_matrices, of_down


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (N, F)."""
    return cpu_kernels.swiglu(gate, up) if cpu_kernels.serve(gate) else functional.silu(gate).mul_(up)


def swiglu_backward(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes by gate and up; all three tensors may be overwritten."""
    if cpu_kernels.serve(gate):
        cpu_kernels.swiglu_backward_(slope, gate, up)
        # They were kept for this pass: a second one would be refused.
        torch.autograd.graph.increment_version((gate, up))
        return gate, up
    of_up = functional.silu(gate).mul_(slope)
    slope.mul_(up)
    return torch.ops.aten.silu_backward.grad_input(slope, gate, grad_input=slope), of_up


# --- RMSNorm -----------------------------------------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of (..., E), which keeps its input alone."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        context.epsilon = epsilon
        context.save_for_backward(hidden, weight)
        return rms_norm(hidden, weight, epsilon)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight = context.saved_tensors
        return *rms_norm_backward(slope, hidden, weight, context.epsilon), None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, as transformers' Llama and Qwen round it.

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if cpu_kernels.serve(hidden):
        return cpu_kernels.rms_norm(hidden, weight, epsilon)
    full = _full(hidden)
    return (full * _scale(full, epsilon)).to(hidden.dtype) * weight


def rms_norm_backward(slope: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The slopes of a loss by `hidden` and by `weight`, from its slope by what was normed."""
    if cpu_kernels.serve(hidden):
        return cpu_kernels.rms_norm_backward(slope, hidden, weight, epsilon)
    full = _full(hidden)
    scale = _scale(full, epsilon)
    normed = full * scale
    of_weight = (slope * normed.to(slope.dtype)).flatten(0, -2).sum(dim=0)
    inner = (slope * weight).to(full.dtype)
    along = torch.linalg.vecdot(inner, normed)[..., None] / hidden.shape[-1]
    return inner.addcmul_(normed, along, value=-1).mul_(scale).to(hidden.dtype), of_weight


def _full(hidden: Tensor) -> Tensor:
    """In float32 or better."""
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def _scale(full: Tensor, epsilon: float) -> Tensor:
    return full.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
