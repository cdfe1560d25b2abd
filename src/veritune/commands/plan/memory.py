"""What a GRPO step keeps in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from veritune.commands.plan.config import PlanConfig
from veritune.commands.plan.devices import GIB, Device
from veritune.commands.plan.shapes import Shape
from veritune.core.config import EngineConfig
from veritune.engines.native.compiled import PAGE
from veritune.engines.native.decode import block_of_columns
from veritune.model.architectures import FAMILY
from veritune.model.head import CHUNK_LOGITS


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the trainer's device at the peak of a pass over one microbatch, gradients of others being there."""

    tokens: int
    """Positions of the microbatch."""
    weights: int
    gradients: int
    moments: int
    reference: int
    activations: int
    """What the backward pass is kept of all layers."""
    head: int
    """What the head works on: a chunk of logits, and gradients of hidden states and of its matrix."""
    layer: int
    """What the last layer's backward pass works on, once the head is done."""

    @property
    def resident(self) -> int:
        """What stays between updates."""
        return self.weights + self.moments + self.reference

    @property
    def peak(self) -> int:
        return self.resident + self.gradients + self.activations + max(self.head, self.layer)


def training_memory(
    shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype, tokens: int
) -> TrainingMemory:
    """Memory of microbatches of `tokens` packed positions, which may all be responses'.

    torch's AdamW keeps two moments in the weights' number type; there is no float32 copy of the weights.
    """
    size = dtype.itemsize
    weights = shape.parameters * size
    hidden, layer = tokens * shape.hidden * size, tokens * kept_by_layer(shape, dtype)
    # Beside the layers: the last norm, and the cosines and sines of the positions.
    around = tokens * (_norm_bytes(shape, dtype) * shape.hidden + 2 * size * shape.query // shape.heads)
    # The gradient of SwiGLU's product, and of one of its inputs where these do not make room for theirs; and the hidden
    # state's gradient on both of its ways. Its two at the head stay.
    slopes = 1 if is_compiled(shape, device, dtype) else 2
    working = tokens * size * slopes * shape.feed_forward + 4 * hidden
    if device.is_gpu and dtype != torch.bfloat16:  # attention has no kernel there: scores, and three of their size
        queries_and_keys = max(config.max_tokens**2, tokens * config.prompt_tokens)
        working += 16 * shape.heads * queries_and_keys
    if config.activation_checkpointing:
        around, layers, working = around + shape.layers * hidden, 0, working + layer
    else:
        layers = shape.layers * layer
    return TrainingMemory(
        tokens=tokens,
        weights=weights,
        gradients=weights,
        moments=2 * weights + 4 * shape.tensors,
        reference=weights if config.kl_coefficient else 0,
        activations=around + layers,
        head=2 * hidden + _head_bytes(shape, device, dtype, tokens),
        layer=working,
    )


def is_compiled(shape: Shape, device: Device, dtype: torch.dtype) -> bool:
    """Whether the layers run by `cpu_kernels`, where these were compiled."""
    return not device.is_gpu and dtype == torch.float32 and shape.model_type in FAMILY


def kept_by_layer(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of one token in one layer, in the order in which the layer computes.

    A norm keeps its input, attention its four tensors and a normaliser for each head, and SwiGLU gate and up. Beyond
    `packed_layers`, a norm also keeps its inverse scale, and as the input of the next product its result, and SwiGLU
    SiLU of gate and its product.
    """
    size, of_norm = dtype.itemsize, _norm_bytes(shape, dtype)
    norms, head_norms = 2 * of_norm * shape.hidden, of_norm * (shape.query + shape.key_value)
    attention = size * (2 * shape.query + 2 * shape.key_value) + 4 * shape.heads
    swiglu = 2 * size * shape.feed_forward
    if shape.model_type not in FAMILY:
        norms += 2 * (size * shape.hidden + 4)
        head_norms += 4 * (shape.heads + shape.key_value_heads)
        swiglu *= 2
    return norms + (head_norms if shape.head_norms else 0) + attention + swiglu


def _norm_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """What a norm keeps of each number that it reads: the number, or it in float32 and normalised."""
    return dtype.itemsize if shape.model_type in FAMILY else 4 + dtype.itemsize


def _head_bytes(shape: Shape, device: Device, dtype: torch.dtype, tokens: int) -> int:
    """The logits of a chunk, which their log-softmax and gradient replace.

    A shorter number type has the log-softmax in float32 beside them, and sums up the matrix's gradient in float32; a
    CPU has the gradient of the logits in float32 too, before it is shortened.
    """
    size, rows = dtype.itemsize, max(1, CHUNK_LOGITS["cuda" if device.is_gpu else "cpu"] // shape.vocabulary)
    chunk = min(tokens, rows) * shape.vocabulary
    if dtype == torch.float32:
        return 4 * chunk
    product = size * shape.head_matrix  # before it is added to the sum
    return 4 * shape.head_matrix + size * chunk + max((4 if device.is_gpu else 8) * chunk, product)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on each sampling device, the trainer's where the engine is native, at the peak of the rollouts."""

    weights: int
    """The engine's own copy: all of them for vLLM, the layers' matrices for the native engine."""
    cache: int
    working: int
    places: int
    """Completions that are decoded side by side on the device."""

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.working


# Sampling draws from cumulative sums in double precision: logits in float32, log-probabilities, and two in float64.
SAMPLING_BYTES = 4 + 4 + 8 + 8


def rollout_memory(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype) -> RolloutMemory:
    """Memory of the engine that the settings name."""
    if config.sampler == "native":
        return _native_memory(shape, config, device, dtype)
    return _vllm_memory(shape, config, device, dtype)


def _native_memory(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype) -> RolloutMemory:
    """The native engine at the last token, with every place still taken."""
    itemsize = dtype.itemsize
    places = min(config.max_rows, config.rollout_batch_size)
    prompts = -(-places // config.group_size) * config.prompt_tokens
    per_token = shape.cache_bytes(itemsize)
    if is_compiled(shape, device, dtype):
        before, columns = 0, -(-(config.max_tokens - 1) // PAGE) * PAGE
    else:
        before, columns = cache_columns(config.max_tokens - 1)
    # Without pages, the cache grows tensor by tensor, keys and values of each layer apart.
    growth = places * before * per_token // (2 * shape.layers)
    prefill = prompts * itemsize * (3 * shape.feed_forward + 3 * shape.hidden)
    sampling = places * shape.vocabulary * (itemsize + SAMPLING_BYTES)
    cache = (places * columns + prompts) * per_token
    copied = shape.layer_matrices * itemsize if shape.model_type in FAMILY else 0
    return RolloutMemory(copied, cache, max(growth, prefill, sampling), places)


def cache_columns(written: int) -> tuple[int, int]:
    """Columns of `decode.Cache` before it grew last, and after that, where a row writes `written` tokens."""
    before, columns = 0, 0
    while columns < written:
        before, columns = columns, columns + block_of_columns(columns, written - columns)
    return before, columns


def _vllm_memory(shape: Shape, config: PlanConfig, device: Device, dtype: torch.dtype) -> RolloutMemory:
    """vLLM's share of a device: its weights, and a cache of all the rest."""
    itemsize = dtype.itemsize
    servers, split = config.engines
    share = int(config.gpu_memory_utilization * device.gib * GIB)
    weights = shape.parameters * itemsize // split
    # A head of keys and values is not split: with more GPUs than heads, several hold the same.
    per_token = shape.cache_bytes(itemsize) // min(split, shape.key_value_heads)
    each = (config.prompt_tokens + config.max_tokens) * per_token
    rows = -(-config.rollout_batch_size // servers)
    most = min(rows, EngineConfig.engine_concurrency * config.group_size) if config.sampler == "vllm-server" else rows
    cache = max(share - weights, 0)
    return RolloutMemory(weights, cache, 0, min(most, cache // each))
