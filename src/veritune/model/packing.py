"""Attention over a packed sequence: no padding, and a prompt's keys and values shared by all of its responses.

Rows are laid end to end, each prompt once and its responses behind it: p p p a a b b b  q q c c. Every segment attends
to itself, causally; a response also attends to the whole of its prompt. Both parts are ordinary attention, so each runs
in the platform's flash kernel, and their results are joined by their log-sum-exps (Milakov and Gimelshein 2018,
arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). The kernels' backward needs the output and log-sum-exp of the
whole alone, so that it is exact part by part too. Short segments of float32 on a CPU are one call of `cpu_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veritune.model.kernels import cpu as cpu_kernels

aten = torch.ops.aten


@dataclass(frozen=True)
class Spans:
    """Runs of queries, laid end to end, and the run of keys that each attends to, laid end to end as well."""

    queries: tuple[int, ...]
    """Length of each run of queries; none is empty."""
    keys: tuple[int, ...]
    """Length of its run of keys; none is empty."""

    @cached_property
    def bounds(self) -> list[tuple[int, int, int, int]]:
        """(first query, one past the last, first key, one past the last) of each span."""
        query_ends, key_ends = accumulate(self.queries), accumulate(self.keys)
        return [
            (query_end - query, query_end, key_end - key, key_end)
            for query, key, query_end, key_end in zip(self.queries, self.keys, query_ends, key_ends, strict=True)
        ]

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each run begins and the last one ends, (spans + 1,) int32, of queries and of keys."""
        ends = [[0, *accumulate(lengths)] for lengths in (self.queries, self.keys)]
        queries, keys = (torch.tensor(each, dtype=torch.int32, device=device) for each in ends)
        return queries, keys


class Segment(NamedTuple):
    """Where a prompt or a response stands; a response also attends to the whole of its prompt."""

    first: int
    length: int
    """Never 0."""
    prompt: int = 0
    """The first token of a response's prompt."""
    prompt_length: int = 0
    """0 for a prompt itself."""


@dataclass(frozen=True)
class Packing:
    """Which positions of one packed sequence attend to which. The properties are what kernels that know one kind of
    span take."""

    segments: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def table(self) -> np.ndarray:
        """(segments, 4) int64, once for all layers and both directions."""
        return np.array(self.segments, dtype=np.int64)

    @cached_property
    def longest(self) -> int:
        """The most positions that one attends to."""
        return cpu_kernels.longest(self.table)

    @cached_property
    def own(self) -> Spans:
        """Every prompt and every response, attending to itself."""
        lengths = tuple(segment.length for segment in self.segments)
        return Spans(lengths, lengths)

    @cached_property
    def across(self) -> Spans:
        """All responses of a prompt, attending to that prompt."""
        return Spans(
            tuple(sum(response.length for response in responses) for responses in self._responses),
            tuple(responses[0].prompt_length for responses in self._responses),
        )

    @cached_property
    def response_positions(self) -> Tensor:
        """(sum of across.queries,)"""
        return self._positions((each.first, each.length) for responses in self._responses for each in responses)

    @cached_property
    def prompt_positions(self) -> Tensor:
        """(sum of across.keys,)"""
        return self._positions((responses[0].prompt, responses[0].prompt_length) for responses in self._responses)

    @cached_property
    def _responses(self) -> list[list[Segment]]:
        """Of each prompt that has some."""
        responses = (segment for segment in self.segments if segment.prompt_length)
        return [list(group) for _, group in groupby(responses, key=lambda response: response.prompt)]

    def _positions(self, runs: Iterable[tuple[int, int]]) -> Tensor:
        return torch.tensor(
            [position for first, length in runs for position in range(first, first + length)],
            dtype=torch.long,
            device=self.device,
        )


@dataclass(frozen=True)
class PackedRows:
    """Rows of (prompt, response) as one sequence. A response's last token predicts nothing and is left out."""

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N), the place of each token in its own row
    packing: Packing
    predictors: Tensor  # (R,), for each response token the position of the token before it
    labels: Tensor  # (R,), the response tokens, row by row


def siblings_of(rows: Sequence[int], prompts_ids: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """The rows of each prompt, in their order; prompts in the order of their first row."""
    siblings: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        siblings.setdefault(tuple(prompts_ids[row]), []).append(row)
    return siblings


def pack_rows(
    prompts_ids: Sequence[Sequence[int]], responses_ids: Sequence[Sequence[int]], device: torch.device
) -> PackedRows:
    """Pack B rows; rows that stand side by side and have equal prompts share one copy of it."""
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    segments: list[Segment] = []
    first = 0  # of the present prompt
    for row, (prompt, response) in enumerate(zip(prompts_ids, responses_ids, strict=True)):
        if row == 0 or tuple(prompt) != tuple(prompts_ids[row - 1]):
            first = len(ids)
            segments.append(Segment(first, len(prompt)))
            ids += prompt
            positions += range(len(prompt))
        inputs = response[:-1]
        if response:
            predictors += [first + len(prompt) - 1, *range(len(ids), len(ids) + len(inputs))]
        if inputs:
            segments.append(Segment(len(ids), len(inputs), first, len(prompt)))
            ids += inputs
            positions += range(len(prompt), len(prompt) + len(inputs))

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return PackedRows(
        tensor(ids)[None],
        tensor(positions)[None],
        Packing(tuple(segments), device),
        tensor(predictors),
        tensor([token for response in responses_ids for token in response]),
    )


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
    """Attention over one packed sequence: `query` (N, H, D), `key` and `value` (N, K, D) with H a multiple of K.

    Returns (N, H, D).
    """
    output: Tensor = _PackedAttention.apply(query, key, value, packing, scale)
    return output


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
        output, logsumexp = attention_forward(query, key, value, packing, scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.packing, ctx.scale = packing, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        tensors = (gradients[0], query, key, value, output, logsumexp)
        return *attention_backward(*tensors, ctx.packing, ctx.scale), None, None


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor]:
    """`packed_attention` without a gradient: output (N, H, D), and log-sum-exp (H, N)."""
    if _is_for_compiled(query, packing):
        return cpu_kernels.packed_attention(query, key, value, packing.table, scale)
    return _attention_by_parts(query, key, value, packing, scale)


def attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    packing: Packing,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value, from the gradient by the output, (N, H, D)."""
    tensors = (grad_output, query, key, value, output, logsumexp)
    if _is_for_compiled(query, packing):
        return cpu_kernels.packed_attention_backward(*tensors, packing.table, scale)
    return _backward_by_parts(*tensors, packing, scale)


COMPILED_NUMBERS = 20_000
"""Beyond so many numbers in the keys of a prompt and a response, torch's kernel, which works on blocks that fit the
processor's caches, is faster than ours, which is one call for all segments."""


def _is_for_compiled(query: Tensor, packing: Packing) -> bool:
    return cpu_kernels.serve(query) and packing.longest * query.shape[-1] <= COMPILED_NUMBERS


def _attention_by_parts(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (N, H, D) and log-sum-exp (H, N) of both kinds of spans, joined."""
    key, value = (_for_each_query_head(query, tensor) for tensor in (key, value))
    output, logsumexp = attend(query, key, value, packing.own, scale, causal=True)
    if packing.across.queries:
        responses, prompts = packing.response_positions, packing.prompt_positions
        seen, seen_logsumexp = attend(
            query[responses], key[prompts], value[prompts], packing.across, scale, causal=False
        )
        own_logsumexp = logsumexp[:, responses]
        joint = torch.logaddexp(own_logsumexp, seen_logsumexp)
        own_share, seen_share = ((part - joint).exp().T[..., None] for part in (own_logsumexp, seen_logsumexp))
        output[responses] = (output[responses] * own_share + seen * seen_share).to(output.dtype)
        logsumexp[:, responses] = joint
    return output, logsumexp


def _backward_by_parts(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    packing: Packing,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    key_heads = key.shape[1]
    key, value = (_for_each_query_head(query, tensor) for tensor in (key, value))
    grad_query, grad_key, grad_value = attend_backward(
        grad_output, query, key, value, output, logsumexp, packing.own, scale, causal=True
    )
    if packing.across.queries:
        responses, prompts = packing.response_positions, packing.prompt_positions
        from_query, from_key, from_value = attend_backward(
            grad_output[responses],
            query[responses],
            key[prompts],
            value[prompts],
            output[responses],
            logsumexp[:, responses],
            packing.across,
            scale,
            causal=False,
        )
        grad_query[responses] += from_query
        grad_key[prompts] += from_key
        grad_value[prompts] += from_value
    if grad_key.shape[1] != key_heads:
        grad_key, grad_value = (each.unflatten(1, (key_heads, -1)).sum(dim=2) for each in (grad_key, grad_value))
    return grad_query, grad_key, grad_value


def _for_each_query_head(query: Tensor, keys: Tensor) -> Tensor:
    """Keys or values (N, K, D) repeated to (N, H, D), where the kernel has no heads that share some."""
    shared = query.shape[1] // keys.shape[1]
    return keys if shared == 1 or _has_flash_kernel(query) else keys.repeat_interleave(shared, dim=1)


# --- The kernels -------------------------------------------------------------------------------------------------


def _has_flash_kernel(query: Tensor) -> bool:
    """Whether torch's CUDA flash kernel takes these queries: whole spans at once, and fewer key than query heads."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of each span's queries (N, H, D) to its keys (M, H, D): output (N, H, D), log-sum-exp (H, N)."""
    if _has_flash_kernel(query):
        bounds = (*spans.cumulative(query.device), max(spans.queries), max(spans.keys))
        output, logsumexp, *_ = aten._flash_attention_forward(
            query, key, value, *bounds, 0.0, causal, False, scale=scale
        )
        return output, logsumexp
    output = torch.empty_like(query)
    logsumexp = query.new_empty(query.shape[1], query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
    one_span = _cpu_attention if query.device.type == "cpu" else plain_attention
    for start, stop, first, last in spans.bounds:
        queries, keys, values = _heads_first(query[start:stop], key[first:last], value[first:last])
        heads_output, logsumexp[:, start:stop] = one_span(queries, keys, values, scale, causal)
        output[start:stop] = heads_output.transpose(0, 1)
    return output, logsumexp


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    spans: Spans,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; `output` and `logsumexp` may be those of more keys than the span's."""
    if _has_flash_kernel(query):
        bounds = (*spans.cumulative(query.device), max(spans.queries), max(spans.keys))
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of a dropout that there is not
        tensors = (grad_output, query, key, value, output, logsumexp.contiguous())
        grad_query, grad_key, grad_value = aten._flash_attention_backward(
            *tensors, *bounds, 0.0, causal, unused, unused[:0], scale=scale
        )
        return grad_query, grad_key, grad_value
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    one_span = _cpu_attention_backward if query.device.type == "cpu" else plain_attention_backward
    for start, stop, first, last in spans.bounds:
        queries, keys = slice(start, stop), slice(first, last)
        upstream, own, outputs = _heads_first(grad_output[queries], query[queries], output[queries])
        seen, values = _heads_first(key[keys], value[keys])
        parts = one_span(upstream, own, seen, values, outputs, logsumexp[:, queries], scale, causal)
        for whole, part, positions in zip(gradients, parts, (queries, keys, keys), strict=True):
            whole[positions] = part.transpose(0, 1)
    return gradients


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(0, 1) for tensor in tensors]


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], 0.0, causal, scale=scale
    )
    return output[0], logsumexp[0]


def _cpu_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    causal: bool,
) -> list[Tensor]:
    tensors = [tensor[None] for tensor in (grad_output, query, key, value, output, logsumexp)]
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    return [each[0] for each in gradients]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v of one span, (H, T, D), and its log-sum-exp (H, T): for devices without a kernel."""
    scores = _scores(query, key, scale, causal)
    logsumexp = scores.logsumexp(dim=-1)
    return ((scores - logsumexp[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype), logsumexp


def plain_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    causal: bool,
) -> list[Tensor]:
    """The gradients of `plain_attention`, by the equations of FlashAttention's backward pass."""
    weights = (_scores(query, key, scale, causal) - logsumexp[..., None]).exp()
    full = [tensor.to(weights.dtype) for tensor in (grad_output, query, key, value, output)]
    upstream, queries, keys, values, outputs = full
    through_softmax = upstream @ values.transpose(1, 2) - (upstream * outputs).sum(-1, keepdim=True)
    grad_scores = scale * weights * through_softmax
    gradients = (grad_scores @ keys, grad_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ upstream)
    return [each.to(query.dtype) for each in gradients]


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = scale * query.to(dtype) @ key.to(dtype).transpose(1, 2)
    if causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores
