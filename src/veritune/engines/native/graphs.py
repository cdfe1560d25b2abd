"""Decode steps that a GPU replays: hundreds of small kernels, launched as one captured graph.

A graph has shapes, addresses and Python's numbers built in, so it serves a cache of fixed shapes
(`Cache(most_siblings=…)`) from one allocation to the next. **Written for CUDA and not run on a GPU yet**: the tests
replay a trace on a CPU, which has the same things built in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from veritune.engines.native.decode import Cache, Layer, decode
from veritune.model.architectures import layers_of

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records what a call does to tensors, without doing it, and returns what does it, again and again."""


class ReplayedSteps:
    """`decode`, captured at the second step of each allocation and replayed from there on.

    The first step runs as it is: it warms up what a capture may not initialise. The next step overwrites the logits.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._allocation = -1
        self._tokens = self._positions = torch.empty(0)
        self._replay: Callable[[], Tensor] | None = None

    def __call__(
        self, model: Any, layers: Sequence[Layer] | None, cache: Cache, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if cache.allocation != self._allocation:
            self._allocation, self._replay = cache.allocation, None
            self._tokens, self._positions = tokens.clone(), positions.clone()
            return decode(model, layers, cache, tokens, positions)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        if self._replay is None:
            self._replay = self._capture(lambda: decode(model, layers, cache, self._tokens, self._positions))
        return self._replay()


def capture_cuda_graph(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of `run`; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def can_be_captured(model: Any) -> bool:
    """Whether a step is the forward pass of `decode`, with rotary positions that ask nothing of the host."""
    return layers_of(model) is not None and model.base_model.rotary_emb.rope_type not in ("dynamic", "longrope")
