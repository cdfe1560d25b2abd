"""Decode steps in float32 on a CPU, each a single call of `cpu_kernels`.

Most steps of a batch have few rows, since rows end one by one; there, calling torch's operators takes longer than what
they do, and matrix products spend their time on bringing the matrix into an order that this module has them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from veritune import cpu_kernels
from veritune.decode import Cache
from veritune.families import LayerWeights, rotary_of

PANEL = 16
"""Columns of a matrix that stand together, as `cpu_kernels.c` reads them."""


class LayerInPanels(NamedTuple):
    """The parameters of one layer. A matrix of N inputs and M outputs is (M / 16, N, 16), M made up with zeros."""

    attention_norm: Tensor
    inwards: Tensor
    """To queries, keys and values."""
    inwards_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    outwards: Tensor
    mlp_norm: Tensor
    gate_and_up: Tensor
    down: Tensor


def layers_in_panels(layers: Sequence[LayerWeights]) -> list[LayerInPanels]:
    """What `CompiledSteps` read, copied from the parameters of a model."""
    return [_in_panels(layer) for layer in layers]


def _in_panels(layer: LayerWeights) -> LayerInPanels:
    attention, mlp = layer.attention, layer.mlp
    biases = [bias for bias in (attention.query_bias, attention.key_bias, attention.value_bias) if bias is not None]
    return LayerInPanels(
        attention.norm,
        _panels(attention.query, attention.key, attention.value),
        functional.pad(torch.cat(biases), (0, -sum(map(len, biases)) % PANEL)) if biases else None,
        attention.query_norm,
        attention.key_norm,
        _panels(attention.outwards),
        mlp.norm,
        _panels(mlp.gate, mlp.up),
        _panels(mlp.down),
    )


def _panels(*matrices: Tensor) -> Tensor:
    """Matrices (out, in) side by side."""
    rows = functional.pad(torch.cat(matrices), (0, 0, 0, -sum(map(len, matrices)) % PANEL))
    return rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


class CompiledSteps:
    """`decode`, of layers in panels and of a cache that is for compiled steps."""

    def __init__(self) -> None:
        self._allocation = -1
        self._step = cpu_kernels.Step()
        self._scratch: list[list[np.ndarray]] = []

    def __call__(
        self, model: Any, layers: Sequence[LayerInPanels], cache: Cache, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if cache.allocation != self._allocation:
            self._allocation = cache.allocation
            self._prepare(model, layers, cache)
        embeddings = model.base_model.embed_tokens.weight
        rotary = rotary_of(model, embeddings, positions[:, None])  # (B, 1, D) each
        states = embeddings.new_empty(len(tokens), embeddings.shape[1])
        step = self._step
        step.column = cache.column
        step.cosine, step.sine, step.tokens, step.states = cpu_kernels.pointers(*rotary, tokens, states)
        places = (cache.order, cache.slots, cache.prompt_lengths, cache.first_columns)
        step.order, step.slots, step.prompt_lengths, step.first_columns = (array.ctypes.data for array in places)
        cpu_kernels.decode(step, len(tokens), self._scratch)
        return model.get_output_embeddings()(states)

    def _prepare(self, model: Any, layers: Sequence[LayerInPanels], cache: Cache) -> None:
        """What stays as it is for as long as the cache's tensors do."""
        (rows, kv_heads, columns, size), prompt_columns = cache.keys[0].shape, cache.prompt_keys[0].shape[2]
        stored = zip(cache.prompt_keys, cache.prompt_values, cache.keys, cache.values, strict=True)
        addresses = [
            cpu_kernels.StepLayer(*cpu_kernels.pointers(*layer, *tensors))
            for layer, tensors in zip(layers, stored, strict=True)
        ]
        first, width = layers[0], len(layers[0].attention_norm)
        heads, inner = first.outwards.shape[1] // size, first.down.shape[1]
        step = self._step
        step.layers, step.width, step.heads, step.kv_heads = len(layers), width, heads, kv_heads
        step.size, step.inner, step.prompt_columns, step.columns = size, inner, prompt_columns, columns
        step.epsilon = model.config.rms_norm_eps
        step.layer = (cpu_kernels.StepLayer * len(layers))(*addresses)
        step.embeddings, step.norm = cpu_kernels.pointers(
            model.base_model.embed_tokens.weight, model.base_model.norm.weight
        )
        # Where each thread keeps hidden states, normed ones, queries with keys and values, what comes out of attention,
        # gates and ups, and their products, of each of its rows, and the weights of attention.
        numbers = 2 * _outputs(first.outwards) + _outputs(first.inwards) + heads * size + _outputs(first.gate_and_up)
        room = rows * (numbers + inner) + prompt_columns + columns
        self._scratch = [[np.empty(room, dtype=np.float32)] for _ in range(torch.get_num_threads())]


def _outputs(panels: Tensor) -> int:
    return len(panels) * PANEL
