"""What a decode step on a CPU does between its matrix products, as compiled from `cpu_kernels.c` at installation.

Out of torch's operators the attention takes a dozen calls, most of them copies, and seven times as long. Where no
compiler was at hand, for other numbers than float32 and on GPUs, `decode` makes all of it out of those.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

INTEGER, NUMBER, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Step(ctypes.Structure):
    """`struct Step`, field for field."""

    _fields_ = (
        *((name, INTEGER) for name in ("heads", "kv_heads", "size", "prompt_width", "width", "column")),
        *(("scale", NUMBER), ("query_and_key", POINTER), ("stride", INTEGER)),
        *(("value", POINTER), ("value_stride", INTEGER), ("cosine", POINTER), ("sine", POINTER)),
        *((name, POINTER) for name in ("prompt_keys", "prompt_values", "keys", "values")),
        *((name, POINTER) for name in ("order", "slots", "prompt_lengths", "first_columns", "mixed")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What was compiled, or None."""
    found = find_spec("veritune._cpu_kernels")
    if found is None or found.origin is None:
        return None
    opened = ctypes.CDLL(found.origin)
    opened.veritune_rms_norm.argtypes = (INTEGER, INTEGER, NUMBER, POINTER, POINTER, POINTER)
    opened.veritune_swiglu.argtypes = (INTEGER, INTEGER, POINTER, POINTER)
    opened.veritune_attend.argtypes = (POINTER, INTEGER, INTEGER, POINTER)
    return opened


def serve(parameter: Tensor) -> bool:
    """Whether a model with such parameters can decode with them."""
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and library() is not None


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * hidden / sqrt(mean(hidden^2) + epsilon), (B, E)."""
    normed = torch.empty_like(hidden)
    _library().veritune_rms_norm(*hidden.shape, epsilon, hidden.data_ptr(), weight.data_ptr(), normed.data_ptr())
    return normed


def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up, (B, F), of both side by side, (B, 2 * F)."""
    rows, size = gate_and_up.shape
    product = gate_and_up.new_empty(rows, size // 2)
    _library().veritune_swiglu(rows, size // 2, gate_and_up.data_ptr(), product.data_ptr())
    return product


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
        *(tensor.data_ptr() for tensor in (*rotary, *stored)),
        *(array.ctypes.data for array in (order, slots, prompt_lengths, first_columns)),
        mixed.data_ptr(),
    )
    call = _library().veritune_attend

    def attend_rows(begin: int, end: int) -> None:
        weights = np.empty(prompt_width + width, dtype=np.float32)
        call(ctypes.byref(step), begin, end, weights.ctypes.data)

    threads = min(torch.get_num_threads(), rows)
    if threads == 1:
        attend_rows(0, rows)
    else:
        cuts = [rows * thread // threads for thread in range(threads + 1)]
        list(_threads(threads).map(attend_rows, cuts[:-1], cuts[1:]))
    return mixed


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)
