"""What decode steps and training do between matrix products on a CPU, as compiled from `cpu_kernels.c` at installation.

torch's operators take up to seven times as long: a single query's attention is a dozen of them, mostly copies, and
packed attention one call for every segment. Where no compiler was at hand, for other numbers than float32 and on GPUs,
their callers make the same of torch's operators.
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
    **{"veritune_rotate_tokens": 0, "veritune_attend": 1, "veritune_packed_forward": 1, "veritune_packed_backward": 2},
}
"""The functions, each for a structure and a range, and how many pieces of scratch memory each takes beside."""


class Norm(ctypes.Structure):
    """`struct Norm`, field for field."""

    _fields_ = (
        *(("size", INTEGER), ("epsilon", NUMBER)),
        *((name, POINTER) for name in ("hidden", "weight", "normed", "slope", "of_hidden")),
    )


class Gated(ctypes.Structure):
    """`struct Gated`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("size", "stride")),
        *((name, POINTER) for name in ("gate", "up", "product", "slope", "of_gate", "of_up")),
    )


class Rotary(ctypes.Structure):
    """`struct Rotary`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "size")),
        *((name, POINTER) for name in ("vectors", "cosine", "sine")),
    )


class Step(ctypes.Structure):
    """`struct Step`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "kv_heads", "size", "prompt_width", "width", "column")),
        *(("scale", NUMBER), ("query_and_key", POINTER), ("stride", INTEGER)),
        *(("value", POINTER), ("value_stride", INTEGER), ("cosine", POINTER), ("sine", POINTER)),
        *((name, POINTER) for name in ("prompt_keys", "prompt_values", "keys", "values")),
        *((name, POINTER) for name in ("order", "slots", "prompt_lengths", "first_columns", "mixed")),
    )


class Packed(ctypes.Structure):
    """`struct Packed`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "kv_heads", "size", "tokens", "segments")),
        *(("scale", NUMBER), ("segment", POINTER)),
        *((name, POINTER) for name in ("query", "key", "value", "output", "logsumexp")),
        *((name, POINTER) for name in ("slope", "of_query", "of_key", "of_value")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What was compiled, or None."""
    found = find_spec("veritune._cpu_kernels")
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
    _share("veritune_rms_norm", Norm(len(weight), epsilon, *_pointers(hidden, weight, normed)), _rows(hidden))
    return normed


def rms_norm_backward(slope: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The slopes of a loss by `hidden` and by `weight`, from its slope by what was normed."""
    slope, hidden = slope.contiguous(), hidden.contiguous()
    of_hidden, size = torch.empty_like(hidden), len(weight)
    norm = Norm(size, epsilon, *_pointers(hidden, weight, None, slope, of_hidden))
    parts = _share("veritune_rms_norm_backward", norm, _rows(hidden), [size])
    return of_hidden, torch.from_numpy(sum(of_weight for (of_weight,) in parts))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (..., F): of two matrices, or of the halves of one with gate and up side by side."""
    product = gate.new_empty(gate.shape)
    _share("veritune_swiglu", Gated(gate.shape[-1], _stride(gate, up), *_pointers(gate, up, product)), _rows(gate))
    return product


def swiglu_backward(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes of a loss by `gate`, which takes the place of the product's, and by `up`."""
    assert slope.is_contiguous()
    of_up = torch.empty_like(slope)
    pointers = _pointers(gate, up, None, slope, slope, of_up)
    _share("veritune_swiglu_backward", Gated(gate.shape[-1], _stride(gate, up), *pointers), _rows(gate))
    return slope, of_up


def rotate_(vectors: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotary positions of `vectors` (N, heads, D), in their place; `sine` (N, D) is negative in its first half."""
    assert vectors.is_contiguous() and cosine.is_contiguous() and sine.is_contiguous()
    tokens, heads, size = vectors.shape
    _share("veritune_rotate_tokens", Rotary(heads, size, *_pointers(vectors, cosine, sine)), tokens)


def attend(
    query_and_key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    stored: Sequence[Tensor],
    order: np.ndarray,
    slots: np.ndarray,
    prompt_lengths: np.ndarray,
    first_columns: np.ndarray,
    column: int,
) -> Tensor:
    """Rotate and keep each row's newest key and value; its query's softmax attention to its prompt and its own past.

    `query_and_key` (B, H + K, D), `value` (B, K, D), and `rotary` the cosine and the sine (B, 1, D), negative in its
    first half. `stored` are the prompts' keys and values (S, K, P, D) and the rows' (at least B, K, W, D), contiguous.
    A row reads `prompt_lengths[slots[row]]` of the prompt in its slot, writes `column` and reads from its first column
    to there. The arrays are int64; `order` is any of the rows. torch's number of threads share them.
    Returns (B, H * D).
    """
    rows, vectors, size = query_and_key.shape
    heads, kv_heads = vectors - value.shape[1], value.shape[1]
    mixed = query_and_key.new_empty(rows, heads * size)
    prompt_width, width = stored[0].shape[2], stored[2].shape[2]
    step = Step(
        *(heads, kv_heads, size, prompt_width, width, column, size**-0.5),
        *(query_and_key.data_ptr(), query_and_key.stride(0), value.data_ptr(), value.stride(0)),
        *_pointers(*rotary, *stored),
        *(array.ctypes.data for array in (order, slots, prompt_lengths, first_columns)),
        mixed.data_ptr(),
    )
    _share("veritune_attend", step, rows, [prompt_width + width])
    return mixed


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
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    segments: np.ndarray,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes of a loss by query, key and value, from its slope by the output, (N, H, D)."""
    slope, query, key, value = (tensor.contiguous() for tensor in (slope, query, key, value))
    slopes = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    packed = _packed(segments, scale, query, key, value, output, logsumexp, slope, *slopes)
    _share("veritune_packed_backward", packed, key.shape[1], [longest(segments)] * 2)
    return slopes


def longest(segments: np.ndarray) -> int:
    """The most tokens that one attends to."""
    return int((segments[:, 1] + segments[:, 3]).max())


def _packed(segments: np.ndarray, scale: float, query: Tensor, key: Tensor, *others: Tensor) -> Packed:
    tokens, heads, size = query.shape
    sizes = (heads, key.shape[1], size, tokens, len(segments))
    return Packed(*sizes, scale, segments.ctypes.data, *_pointers(query, key, *others))


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1]


def _stride(gate: Tensor, up: Tensor) -> int:
    """From one row of both to the next."""
    assert gate.stride() == up.stride() and gate.stride(-1) == 1
    return gate.stride(-2)


def _pointers(*tensors: Tensor | None) -> Iterator[int | None]:
    return (None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _share(name: str, argument: ctypes.Structure, count: int, rooms: Sequence[int] = ()) -> list[list[np.ndarray]]:
    """Call a function for `count` things, a part by each of torch's threads.

    Returns what each part has left in its scratch memory, of so many numbers as `rooms` says.
    """
    opened = library()
    assert opened is not None
    function, address = getattr(opened, name), ctypes.byref(argument)

    def call(begin: int, end: int) -> list[np.ndarray]:
        scratch = [np.empty(room, dtype=np.float32) for room in rooms]
        function(address, begin, end, *[each.ctypes.data for each in scratch])
        return scratch

    threads = torch.get_num_threads()
    parts = max(1, min(threads, count))
    if parts == 1:
        return [call(0, count)]
    cuts = [count * part // parts for part in range(parts + 1)]
    return list(_threads(threads).map(call, cuts[:-1], cuts[1:]))


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)
