"""Training between matrix products, and whole decode steps, on a CPU: as compiled from `cpu_kernels.c` at installation.

torch's operators take up to seven times as long: a single query's attention is a dozen of them, mostly copies, packed
attention one call for every segment, and a product of few rows spends its time on putting the matrix in order. Where no
compiler was at hand, for other numbers than float32 and on GPUs, their callers make the same of torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

INTEGER, NUMBER, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

SCRATCH = {
    **{"veritune_rms_norm": 0, "veritune_rms_norm_backward": 1, "veritune_swiglu": 0, "veritune_swiglu_backward": 0},
    **{"veritune_rotate_tokens": 0, "veritune_decode": 1, "veritune_packed_forward": 1, "veritune_packed_backward": 2},
}
"""The functions, each for a structure and a range, and how many pieces of scratch memory each takes beside."""


class Norm(ctypes.Structure):
    """`struct Norm`, field for field."""

    _fields_ = (
        *(("size", INTEGER), ("epsilon", NUMBER)),
        *((name, POINTER) for name in ("hidden", "weight", "normed", "grad_output", "grad_hidden")),
    )


class Gated(ctypes.Structure):
    """`struct Gated`, field for field."""

    _fields_ = tuple((name, POINTER) for name in ("gate", "up", "product", "grad_output"))


class Rotary(ctypes.Structure):
    """`struct Rotary`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "size")),
        *((name, POINTER) for name in ("vectors", "cosine", "sine")),
    )


class StepLayer(ctypes.Structure):
    """`struct StepLayer`, field for field."""

    _fields_ = (
        *((name, POINTER) for name in ("attention_norm", "qkv_proj", "qkv_bias", "query_norm", "key_norm")),
        *((name, POINTER) for name in ("o_proj", "mlp_norm", "gate_and_up", "down")),
        *((name, POINTER) for name in ("prompt_keys", "prompt_values")),
    )


class Step(ctypes.Structure):
    """`struct Step`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("layers", "width", "heads", "kv_heads", "size", "inner")),
        *((name, INTEGER) for name in ("prompt_columns", "row_pages")),
        *(("epsilon", NUMBER), ("layer", ctypes.POINTER(StepLayer))),
        *((name, POINTER) for name in ("embeddings", "norm", "cosine", "sine")),
        *(
            (name, POINTER)
            for name in ("tokens", "pages", "written", "order", "prompt_of_row", "prompt_lengths", "states")
        ),
    )


class Packed(ctypes.Structure):
    """`struct Packed`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "kv_heads", "size", "tokens", "segments")),
        *(("scale", NUMBER), ("segment", POINTER)),
        *((name, POINTER) for name in ("query", "key", "value", "output", "logsumexp")),
        *((name, POINTER) for name in ("grad_output", "grad_query", "grad_key", "grad_value")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What was compiled, or None."""
    found = find_spec("veritune.model.kernels._cpu")
    if found is None or found.origin is None:
        return None
    opened = ctypes.CDLL(found.origin)
    for name, scratch in SCRATCH.items():
        getattr(opened, name).argtypes = (POINTER, INTEGER, INTEGER, *[POINTER] * scratch)
    return opened


def serve(parameter: Tensor) -> bool:
    """Whether the kernels take such numbers, and are there."""
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and library() is not None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * hidden / sqrt(mean(hidden^2) + epsilon), (..., E)."""
    hidden = hidden.contiguous()
    normed = torch.empty_like(hidden)
    _share("veritune_rms_norm", Norm(len(weight), epsilon, *pointers(hidden, weight, normed)), _rows(hidden))
    return normed


def rms_norm_backward(grad_output: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gradients by `hidden` and by `weight`, from the gradient by what was normed."""
    grad_output, hidden = grad_output.contiguous(), hidden.contiguous()
    grad_hidden, size = torch.empty_like(hidden), len(weight)
    norm = Norm(size, epsilon, *pointers(hidden, weight, None, grad_output, grad_hidden))
    parts = _share("veritune_rms_norm_backward", norm, _rows(hidden), [size])
    return grad_hidden, torch.from_numpy(sum(grad_weight for (grad_weight,) in parts))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape, both contiguous."""
    product = torch.empty_like(gate)
    _share("veritune_swiglu", Gated(*pointers(gate, up, product)), gate.numel())
    return product


def swiglu_backward_(grad_output: Tensor, gate: Tensor, up: Tensor) -> None:
    """Gradients by `gate` and by `up`, in their place, from the gradient by their product; all contiguous."""
    _share("veritune_swiglu_backward", Gated(*pointers(gate, up, None, grad_output)), gate.numel())


def rotate_(vectors: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotary positions of `vectors` (N, heads, D), in their place; `sine` (N, D) is negative in its first half."""
    tokens, heads, size = vectors.shape
    _share("veritune_rotate_tokens", Rotary(heads, size, *pointers(vectors, cosine, sine)), tokens)


def decode(step: Step, rows: int, scratch: Sequence[Sequence[np.ndarray]]) -> None:
    """A decode step of so many rows, a part of them for each piece of scratch memory."""
    _call("veritune_decode", step, rows, scratch)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: np.ndarray, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every token to its segment up to itself, and to the whole prompt of its segment.

    `query` (N, H, D), `key` and `value` (N, K, D) with H a multiple of K. A row of `segments`, (S, 4) int64, is first
    token, tokens, first token of its prompt, and tokens of its prompt or 0. Returns output (N, H, D) and log-sum-exp
    (H, N). torch's number of threads share the heads of keys.
    """
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    output, logsumexp = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
    packed = _packed(segments, scale, query, key, value, output, logsumexp)
    _share("veritune_packed_forward", packed, key.shape[1], [longest(segments)])
    return output, logsumexp


def packed_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    segments: np.ndarray,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value, from the gradient by the output, (N, H, D)."""
    grad_output, query, key, value = (tensor.contiguous() for tensor in (grad_output, query, key, value))
    gradients = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    packed = _packed(segments, scale, query, key, value, output, logsumexp, grad_output, *gradients)
    _share("veritune_packed_backward", packed, key.shape[1], [longest(segments)] * 2)
    return gradients


def longest(segments: np.ndarray) -> int:
    """The most tokens that one attends to."""
    return int((segments[:, 1] + segments[:, 3]).max())


def _packed(segments: np.ndarray, scale: float, query: Tensor, key: Tensor, *others: Tensor) -> Packed:
    tokens, heads, size = query.shape
    sizes = (heads, key.shape[1], size, tokens, len(segments))
    return Packed(*sizes, scale, segments.ctypes.data, *pointers(query, key, *others))


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1]


def pointers(*tensors: Tensor | None) -> Iterator[int | None]:
    """Where their numbers begin, which follow one another; None for None."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return (None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _share(name: str, argument: ctypes.Structure, count: int, rooms: Sequence[int] = ()) -> list[list[np.ndarray]]:
    """Call a function for `count` things, a part by each of torch's threads.

    Returns what each part has left in its scratch memory, of so many numbers as `rooms` says.
    """
    parts = max(1, min(torch.get_num_threads(), count))
    scratch = [[np.empty(room, dtype=np.float32) for room in rooms] for _ in range(parts)]
    _call(name, argument, count, scratch)
    return scratch


def _call(name: str, argument: ctypes.Structure, count: int, scratch: Sequence[Sequence[np.ndarray]]) -> None:
    """A thread for each part, which has its own scratch memory."""
    opened = library()
    assert opened is not None
    function, address, parts = getattr(opened, name), ctypes.byref(argument), len(scratch)

    def call(part: int) -> None:
        memory = [each.ctypes.data for each in scratch[part]]
        function(address, count * part // parts, count * (part + 1) // parts, *memory)

    if parts == 1:
        call(0)
    else:
        list(_threads(torch.get_num_threads()).map(call, range(parts)))


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)
