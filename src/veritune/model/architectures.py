"""The models that nearly everybody trains share one decoder layer: which ones they are, and its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type` of architectures whose layers are those below."""


class AttentionWeights(NamedTuple):
    """Of hidden + attention(RMSNorm(hidden)); matrices are (out, in), as the model has them."""

    norm: Tensor
    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    query_norm: Tensor | None
    """(D,) of each head, where heads are normed before they are rotated."""
    key_norm: Tensor | None
    o_proj: Tensor

    @property
    def qkv_proj(self) -> Tensor:
        """A copy of the matrices to queries, keys and values as one."""
        return torch.cat((self.query, self.key, self.value))

    @property
    def qkv_bias(self) -> Tensor | None:
        biases = [bias for bias in (self.query_bias, self.key_bias, self.value_bias) if bias is not None]
        return torch.cat(biases) if biases else None


class MLPWeights(NamedTuple):
    """Of hidden + SwiGLU(RMSNorm(hidden))."""

    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def gate_and_up(self) -> Tensor:
        """A copy of both matrices as one."""
        return torch.cat((self.gate, self.up))


class LayerWeights(NamedTuple):
    head_size: int
    """Numbers of each head's query, key and value."""
    attention: AttentionWeights
    mlp: MLPWeights


def has_packed_layers(model: Any) -> bool:
    """Whether the model's layers are those above; not where they are of another shape or have adapters."""
    if model.config.model_type not in FAMILY or model.config.hidden_act != "silu":
        return False
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        without_bias = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, *without_bias)
        if any(type(linear) is not torch.nn.Linear for linear in linears):
            return False
        if any(linear.bias is not None for linear in without_bias):
            return False
    return True


def layers_of(model: Any) -> list[LayerWeights] | None:
    """The parameters of the model's layers; None where they are not those above."""
    return [weights_of(layer) for layer in model.base_model.layers] if has_packed_layers(model) else None


def weights_of(layer: Any) -> LayerWeights:
    """The parameters of a layer of a model that `has_packed_layers`."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    return LayerWeights(
        attention.head_dim,
        AttentionWeights(
            layer.input_layernorm.weight,
            *(query.weight, query.bias, key.weight, key.bias, value.weight, value.bias),
            attention.q_norm.weight if normed else None,
            attention.k_norm.weight if normed else None,
            attention.o_proj.weight,
        ),
        MLPWeights(
            layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        ),
    )


def rotary_of(model: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, (..., D) each for `positions` (...), the sine negative in its first half."""
    cosine, sine = model.base_model.rotary_emb(hidden, positions)
    half = sine.shape[-1] // 2
    return cosine, torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)
