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

from veritune.engines.native.decode import CachedPrompts, close_gaps, fill_gaps
from veritune.model.architectures import LayerWeights, rotary_of
from veritune.model.kernels import cpu as cpu_kernels

PANEL = 16
"""Columns of a matrix that stand together, as `cpu_kernels.c` reads them."""

PAGE = 16
"""Tokens of a page, as `cpu_kernels.c` reads them."""


class LayerInPanels(NamedTuple):
    """The parameters of one layer. A matrix of N inputs and M outputs is (M / 16, N, 16), M made up with zeros."""

    attention_norm: Tensor
    qkv_proj: Tensor
    """To queries, keys and values."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    o_proj: Tensor
    mlp_norm: Tensor
    gate_and_up: Tensor
    down: Tensor


def layers_in_panels(layers: Sequence[LayerWeights]) -> list[LayerInPanels]:
    """What `CompiledSteps` read, copied from the parameters of a model."""
    return [_in_panels(layer) for layer in layers]


def _in_panels(layer: LayerWeights) -> LayerInPanels:
    attention, mlp, bias = layer.attention, layer.mlp, layer.attention.qkv_bias
    return LayerInPanels(
        attention.norm,
        _panels(attention.qkv_proj),
        None if bias is None else functional.pad(bias, (0, -len(bias) % PANEL)),
        attention.query_norm,
        attention.key_norm,
        _panels(attention.o_proj),
        mlp.norm,
        _panels(mlp.gate_and_up),
        _panels(mlp.down),
    )


def _panels(matrix: Tensor) -> Tensor:
    """Of a matrix (out, in)."""
    rows = functional.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    return rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


class PagedCache(CachedPrompts):
    """What each live row has generated beside its prompt, in pages, so that nothing moves while rows come, grow and go.

    A page holds keys and values of PAGE tokens of one row in all layers, (layers, 2, heads, PAGE, size). Kwon et al.
    2023, arXiv 2309.06180.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = np.zeros(0, dtype=np.int64)
        """(B,) tokens that each live row has generated before the present step."""
        self.addresses = np.zeros((0, 1), dtype=np.int64)
        """(B, most pages of a row), where each page of a row begins."""
        self.order = np.zeros(0, dtype=np.int64)
        """(B,) live rows, siblings one after another: their prompt is then at hand."""
        self._pages: list[list[Tensor]] = []

    @property
    def rows(self) -> int:
        """Rows that a step computes."""
        return self.live

    def admit(self, prefilled: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], prompts: np.ndarray) -> None:
        super().admit(prefilled, lengths, prompts)
        self.written = np.concatenate([self.written, np.full(len(prompts), -1)])
        self.addresses = np.pad(self.addresses, ((0, len(prompts)), (0, 0)))
        self._pages += [[] for _ in prompts]
        self._order_anew()

    def release(self, finished: np.ndarray) -> None:
        self.written, self.addresses = (close_gaps(each, finished) for each in (self.written, self.addresses))
        for source, target in zip(*fill_gaps(finished), strict=True):
            self._pages[target] = self._pages[source]
        del self._pages[len(self.written) :]
        super().release(finished)
        self._order_anew()

    def begin_step(self, *_: int) -> None:
        """Have room for every live row's newest token."""
        self.written += 1
        for row in np.flatnonzero(self.written % PAGE == 0).tolist():
            pages = self._pages[row]
            if len(pages) == self.addresses.shape[1]:
                self.addresses = np.pad(self.addresses, ((0, 0), (0, len(pages))))
                self.allocation += 1
            page = self._new_page()
            self.addresses[row, len(pages)] = page.data_ptr()
            pages.append(page)

    def _new_page(self) -> Tensor:
        prompts = self.prompt_keys[0]
        return prompts.new_empty(len(self.prompt_keys), 2, prompts.shape[1], PAGE, prompts.shape[3])

    def _order_anew(self) -> None:
        self.order = np.argsort(self.prompt_of_row, kind="stable")


class CompiledSteps:
    """`decode`, of layers in panels and a cache in pages."""

    def __init__(self) -> None:
        self._allocation = -1
        self._step = cpu_kernels.Step()
        self._scratch: list[list[np.ndarray]] = []

    def __call__(
        self, model: Any, layers: Sequence[LayerInPanels], cache: PagedCache, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if cache.allocation != self._allocation:
            self._allocation = cache.allocation
            self._prepare(model, layers, cache)
        embeddings = model.base_model.embed_tokens.weight
        rotary = rotary_of(model, embeddings, positions[:, None])  # (B, 1, D) each
        states = embeddings.new_empty(len(tokens), embeddings.shape[1])
        step = self._step
        step.cosine, step.sine, step.tokens, step.states = cpu_kernels.pointers(*rotary, tokens, states)
        arrays = (cache.addresses, cache.written, cache.order, cache.prompt_of_row, cache.prompt_lengths)
        step.pages, step.written, step.order, step.prompt_of_row, step.prompt_lengths = (
            each.ctypes.data for each in arrays
        )
        cpu_kernels.decode(step, len(tokens), self._scratch)
        return model.get_output_embeddings()(states)

    def _prepare(self, model: Any, layers: Sequence[LayerInPanels], cache: PagedCache) -> None:
        """What stays as it is from one allocation to the next."""
        first, (_, kv_heads, prompt_columns, size) = layers[0], cache.prompt_keys[0].shape
        heads, inner, row_pages = first.o_proj.shape[1] // size, first.down.shape[1], cache.addresses.shape[1]
        prompts = zip(cache.prompt_keys, cache.prompt_values, strict=True)
        addresses = [
            cpu_kernels.StepLayer(*cpu_kernels.pointers(*layer, *pair))
            for layer, pair in zip(layers, prompts, strict=True)
        ]
        embeddings, norm = model.base_model.embed_tokens.weight, model.base_model.norm.weight
        self._step = cpu_kernels.Step(
            layers=len(layers),
            width=len(norm),
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            inner=inner,
            prompt_columns=prompt_columns,
            row_pages=row_pages,
            epsilon=model.config.rms_norm_eps,
            layer=(cpu_kernels.StepLayer * len(layers))(*addresses),
            embeddings=embeddings.data_ptr(),
            norm=norm.data_ptr(),
        )
        # Where each thread keeps hidden states, normed ones, queries with keys and values, what comes out of attention,
        # gates and ups, and their products, of each of its rows, and the weights of attention.
        numbers = 2 * _outputs(first.o_proj) + _outputs(first.qkv_proj) + heads * size + _outputs(first.gate_and_up)
        room = cache.live * (numbers + inner) + prompt_columns + row_pages * PAGE
        self._scratch = [[np.empty(room, dtype=np.float32)] for _ in range(torch.get_num_threads())]


def _outputs(panels: Tensor) -> int:
    return len(panels) * PANEL
